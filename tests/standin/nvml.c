/* A stand-in for NVIDIA's libnvidia-ml.so.1, as far as nvidia-ml-py 12 and 13 ask it here.
 *
 * The state is a directory, named by SUPERVISOR_VLLM_TEST_GPUS:
 *   init_error, error      an NVML return code that nvmlInit, or every call after it, gives
 *   hang, crash            every call after nvmlInit never comes back, or ends the process with SIGSEGV
 *   driver_version         text
 *   gpu<N>/total           bytes
 *   gpu<N>/name, uuid      text
 *   gpu<N>/error, hang, crash             as above, for this device's own calls
 *   gpu<N>/error.<call>    a return code of one call: memory, processes, graphics, mps, uuid, name, mig, gi, ci
 *   gpu<N>/holders/<pid>   "bytes" or "bytes starttime" (field 22 of /proc/<pid>/stat); bytes "-": the driver can't say
 *   gpu<N>/graphics/<pid>, mps/<pid>      the same in the lists of graphics processes and of clients of MPS
 *   gpu<N>/elsewhere/<pid> a compute process of another pid namespace: it counts whatever lives here
 *   gpu<N>/mig/            MIG mode is on; gpu<N>/mig/<i>/ is a MIG device with the files of a GPU, and gi, ci (its ids)
 * A holder counts while its process lives and is no zombie: as with a driver, a dead process holds nothing.
 */
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { MAX_MIG = 7, MAX_DEVICES = 16, MAX_HOLDERS = 256 };

typedef unsigned long long bytes_t;
typedef struct device { unsigned index, instance; struct device *parent; char place[64]; } device_t;
typedef struct { bytes_t total, free, used; } memory_t;
typedef struct { unsigned version; bytes_t total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned pid; bytes_t used; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { unsigned pid; bytes_t used; } process_v1_t;

static const bytes_t NOT_AVAILABLE = ~0ull;
static device_t devices[MAX_DEVICES], mig_devices[MAX_DEVICES][MAX_MIG];
static int initialised;

/* A path below the state directory; `place` is a device's, or "" for all of them. */
static int state_path(char *out, size_t size, const char *place, const char *name)
{
    const char *root = getenv("SUPERVISOR_VLLM_TEST_GPUS");
    return root && snprintf(out, size, "%s/%s/%s", root, place, name) < (int)size;
}

static int exists(const char *place, const char *name)
{
    char path[4096];
    return state_path(path, sizeof path, place, name) && !access(path, F_OK);
}

static int read_text(const char *path, char *out, size_t size)
{
    FILE *file = fopen(path, "r");
    if (!file)
        return 0;
    size_t length = fread(out, 1, size - 1, file);
    fclose(file);
    while (length && (out[length - 1] == '\n' || out[length - 1] == ' '))
        length--;
    out[length] = 0;
    return length > 0;
}

static int state_text(const char *place, const char *name, char *out, size_t size)
{
    char path[4096];
    return state_path(path, sizeof path, place, name) && read_text(path, out, size);
}

static void misbehave(const char *place)
{
    while (exists(place, "hang"))
        pause();
    if (exists(place, "crash")) {
        signal(SIGSEGV, SIG_DFL);
        raise(SIGSEGV);
    }
}

static int injected(const device_t *device)
{
    char text[64];
    if (!initialised)
        return UNINITIALIZED;
    misbehave("");
    if (state_text("", "error", text, sizeof text))
        return atoi(text);
    if (!device)
        return SUCCESS;
    misbehave(device->place);
    return state_text(device->place, "error", text, sizeof text) ? atoi(text) : SUCCESS;
}

/* A return code for one call: gpu<N>/error.<call> */
static int injected_call(const device_t *device, const char *call)
{
    char name[64], text[64];
    int code = injected(device);
    snprintf(name, sizeof name, "error.%s", call);
    return !code && state_text(device->place, name, text, sizeof text) ? atoi(text) : code;
}

/* The start time of a living process; 0 when it is dead or a zombie. */
static bytes_t start_time(unsigned pid)
{
    char path[64], text[1024], state;
    bytes_t started;
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    if (!read_text(path, text, sizeof text))
        return 0;
    char *after_name = strrchr(text, ')');
    if (!after_name || sscanf(after_name + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d "
                                              "%*d %llu", &state, &started) != 2)
        return 0;
    return state == 'Z' || state == 'X' ? 0 : started;
}

/* The processes of one list, behind the `count` that are there already. */
static unsigned read_list(const char *place, const char *list, int of_here, process_t *out, unsigned count)
{
    char path[4096], text[128];
    DIR *directory = state_path(path, sizeof path, place, list) ? opendir(path) : NULL;
    if (!directory)
        return count;
    for (struct dirent *entry; (entry = readdir(directory)) && count < MAX_HOLDERS;) {
        char *end, name[300];
        unsigned long pid = strtoul(entry->d_name, &end, 10);
        if (*end || end == entry->d_name)
            continue;
        bytes_t living = of_here ? start_time((unsigned)pid) : 1, held = 0, started = 0;
        snprintf(name, sizeof name, "%s/%s", list, entry->d_name);
        if (!living || !state_text(place, name, text, sizeof text))
            continue;
        int read = sscanf(text, "%llu %llu", &held, &started);
        if (of_here && read == 2 && started != living)
            continue;
        out[count++] = (process_t){(unsigned)pid, text[0] == '-' ? NOT_AVAILABLE : held, ~0u, ~0u};
    }
    closedir(directory);
    return count;
}

static unsigned compute_processes(const device_t *device, process_t *out)
{
    return read_list(device->place, "elsewhere", 0, out, read_list(device->place, "holders", 1, out, 0));
}

static void read_memory(const device_t *device, bytes_t *total, bytes_t *used)
{
    char text[64];
    process_t holders[MAX_HOLDERS];
    *total = state_text(device->place, "total", text, sizeof text) ? strtoull(text, NULL, 10) : 0;
    *used = 0;
    unsigned count = compute_processes(device, holders);
    count = read_list(device->place, "graphics", 1, holders, count);
    for (unsigned i = 0; i < count; i++)
        if (holders[i].used != NOT_AVAILABLE)
            *used += holders[i].used;
    if (*used > *total)
        *used = *total;
}

static int copy_text(char *out, unsigned length, const char *text)
{
    if (strlen(text) + 1 > length)
        return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    char path[4096], text[64];
    if (!state_path(path, sizeof path, "", ""))
        return 9; /* driver not loaded */
    if (state_text("", "init_error", text, sizeof text))
        return atoi(text);
    initialised++;
    for (unsigned i = 0; i < MAX_DEVICES; i++) {
        devices[i].index = i;
        snprintf(devices[i].place, sizeof devices[i].place, "gpu%u", i);
    }
    return SUCCESS;
}
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void)
{
    if (!initialised)
        return UNINITIALIZED;
    initialised--;
    return SUCCESS;
}

const char *nvmlErrorString(int code)
{
    static const char *const texts[] = {"Success", "Uninitialized", "Invalid Argument", "Not Supported",
        "Insufficient Permissions", "Already Initialized", "Not Found", "Insufficient Size",
        "Insufficient External Power", "Driver Not Loaded", "Timeout", "Interrupt Request Issue",
        "NVML Shared Library Not Found", "Function Not Found", "Corrupted infoROM", "GPU is lost",
        "GPU requires reset", "GPU access blocked by the operating system", "Driver/library version mismatch"};
    return code >= 0 && code < (int)(sizeof texts / sizeof *texts) ? texts[code] : "Unknown Error";
}

int nvmlSystemGetDriverVersion(char *out, unsigned length)
{
    char text[64];
    int code = injected(NULL);
    return code ? code : copy_text(out, length, state_text("", "driver_version", text, sizeof text) ? text : "580.95.05");
}
int nvmlSystemGetNVMLVersion(char *out, unsigned length) { return copy_text(out, length, "13.580.95.05"); }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return injected(NULL); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

int nvmlDeviceGetCount_v2(unsigned *count)
{
    char place[64];
    int code = injected(NULL);
    if (code)
        return code;
    for (*count = 0; *count < MAX_DEVICES; ++*count) {
        snprintf(place, sizeof place, "gpu%u", *count);
        if (!exists(place, "total"))
            break;
    }
    return SUCCESS;
}
int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t **device)
{
    unsigned count;
    int code = nvmlDeviceGetCount_v2(&count);
    if (code)
        return code;
    if (index >= count)
        return INVALID_ARGUMENT;
    *device = &devices[index];
    return injected(*device);
}
int nvmlDeviceGetHandleByIndex(unsigned index, device_t **device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }

int nvmlDeviceGetHandleByUUID(const char *uuid, device_t **device)
{
    unsigned count;
    char text[128];
    int code = nvmlDeviceGetCount_v2(&count);
    for (unsigned i = 0; !code && i < count; i++)
        if (state_text(devices[i].place, "uuid", text, sizeof text) && !strcmp(text, uuid)) {
            *device = &devices[i];
            return SUCCESS;
        }
    return code ? code : NOT_FOUND;
}

int nvmlDeviceGetIndex(device_t *device, unsigned *index) { *index = device->index; return injected(device); }

static int device_name(device_t *device, const char *file, const char *otherwise, char *out, unsigned length)
{
    char text[128];
    int code = injected_call(device, file);
    if (code)
        return code;
    return copy_text(out, length, state_text(device->place, file, text, sizeof text) ? text : otherwise);
}
int nvmlDeviceGetName(device_t *device, char *out, unsigned length)
{
    return device_name(device, "name", "NVIDIA Stand-in", out, length);
}
int nvmlDeviceGetUUID(device_t *device, char *out, unsigned length)
{
    char otherwise[64];
    snprintf(otherwise, sizeof otherwise, "GPU-00000000-0000-0000-0000-%012u", device->index);
    return device_name(device, "uuid", otherwise, out, length);
}

int nvmlDeviceGetMigMode(device_t *device, unsigned *current, unsigned *pending)
{
    int code = injected_call(device, "mig");
    *current = *pending = exists(device->place, "mig");
    return code ? code : *current ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetMaxMigDeviceCount(device_t *device, unsigned *count) { *count = MAX_MIG; return injected(device); }
int nvmlDeviceGetMigDeviceHandleByIndex(device_t *device, unsigned index, device_t **out)
{
    if (index >= MAX_MIG)
        return INVALID_ARGUMENT;
    device_t *mig = &mig_devices[device->index][index];
    *mig = (device_t){.index = device->index, .instance = index, .parent = device};
    snprintf(mig->place, sizeof mig->place, "gpu%u/mig/%u", device->index, index);
    if (!exists(mig->place, "total"))
        return NOT_FOUND;
    *out = mig;
    return injected(device);
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device_t *mig, device_t **out)
{
    if (!mig->parent)
        return INVALID_ARGUMENT;
    *out = mig->parent;
    return injected(mig);
}
static int mig_id(device_t *mig, const char *file, unsigned otherwise, unsigned *id)
{
    char text[64];
    int code = injected_call(mig, file);
    if (code)
        return code;
    if (!mig->parent)
        return NOT_SUPPORTED;
    *id = state_text(mig->place, file, text, sizeof text) ? (unsigned)atoi(text) : otherwise;
    return SUCCESS;
}
int nvmlDeviceGetGpuInstanceId(device_t *mig, unsigned *id) { return mig_id(mig, "gi", mig->instance + 1, id); }
int nvmlDeviceGetComputeInstanceId(device_t *mig, unsigned *id) { return mig_id(mig, "ci", 0, id); }

int nvmlDeviceGetMemoryInfo(device_t *device, memory_t *out)
{
    int code = injected_call(device, "memory");
    if (code)
        return code;
    read_memory(device, &out->total, &out->used);
    out->free = out->total - out->used;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(device_t *device, memory_v2_t *out)
{
    int code = injected_call(device, "memory");
    if (code)
        return code;
    read_memory(device, &out->total, &out->used);
    out->free = out->total - out->used;
    out->reserved = 0;
    return SUCCESS;
}

static int give(const process_t *found, unsigned here, unsigned *count, process_t *out)
{
    unsigned room = out ? *count : 0;
    *count = here;
    if (here > room)
        return INSUFFICIENT_SIZE;
    if (here)
        memcpy(out, found, here * sizeof *out);
    return SUCCESS;
}
static int give_list(device_t *device, const char *call, const char *list, unsigned *count, process_t *out)
{
    process_t found[MAX_HOLDERS];
    int code = injected_call(device, call);
    return code ? code : give(found, read_list(device->place, list, 1, found, 0), count, out);
}

int nvmlDeviceGetComputeRunningProcesses_v3(device_t *device, unsigned *count, process_t *out)
{
    process_t found[MAX_HOLDERS];
    int code = injected_call(device, "processes");
    return code ? code : give(found, compute_processes(device, found), count, out);
}
int nvmlDeviceGetComputeRunningProcesses_v2(device_t *device, unsigned *count, process_t *out)
{
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, out);
}
int nvmlDeviceGetComputeRunningProcesses(device_t *device, unsigned *count, process_v1_t *out)
{
    process_t found[MAX_HOLDERS];
    unsigned room = out ? *count : 0;
    *count = MAX_HOLDERS;
    int code = nvmlDeviceGetComputeRunningProcesses_v3(device, count, found);
    if (code)
        return code;
    if (*count > room)
        return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++)
        out[i] = (process_v1_t){found[i].pid, found[i].used};
    return SUCCESS;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(device_t *device, unsigned *count, process_t *out)
{
    return give_list(device, "graphics", "graphics", count, out);
}
int nvmlDeviceGetGraphicsRunningProcesses_v2(device_t *device, unsigned *count, process_t *out)
{
    return nvmlDeviceGetGraphicsRunningProcesses_v3(device, count, out);
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(device_t *device, unsigned *count, process_t *out)
{
    return give_list(device, "mps", "mps", count, out);
}
int nvmlDeviceGetMPSComputeRunningProcesses_v2(device_t *device, unsigned *count, process_t *out)
{
    return nvmlDeviceGetMPSComputeRunningProcesses_v3(device, count, out);
}
