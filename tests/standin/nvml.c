/* A stand-in for NVIDIA's libnvidia-ml.so.1, as far as nvidia-ml-py 12 and 13 ask it here.
 *
 * The state is a directory, named by SUPERVISOR_VLLM_TEST_GPUS:
 *   init_error, error      an NVML return code that nvmlInit, or every call after it, gives
 *   hang, crash            every call after nvmlInit never comes back, or ends the process with SIGSEGV
 *   driver_version         text
 *   gpu<N>/total           bytes
 *   gpu<N>/name, uuid      text
 *   gpu<N>/error, hang, crash             as above, for this device's own calls
 *   gpu<N>/error.<call>    a return code of one call: memory, processes, graphics, mps, uuid, name, mig
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
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { MAX_DEVICES = 16, MAX_MIG = 8, MAX_HOLDERS = 256, WHOLE = -1 };

typedef unsigned long long bytes_t;
typedef struct { unsigned index; int mig; } device_t;
typedef struct { bytes_t total, free, used; } memory_t;
typedef struct { unsigned version; bytes_t total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned pid; bytes_t used; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { unsigned pid; bytes_t used; } process_v1_t;

static const bytes_t NOT_AVAILABLE = ~0ULL; /* NVML_VALUE_NOT_AVAILABLE */
static const unsigned NO_INSTANCE = 0xFFFFFFFFu;

static device_t devices[MAX_DEVICES], mig_devices[MAX_DEVICES][MAX_MIG];
static int initialised;

/* A file of the device; of the whole host where there's no device. */
static int state_path(char *out, size_t size, const device_t *device, const char *name)
{
    char place[64] = "";
    const char *root = getenv("SUPERVISOR_VLLM_TEST_GPUS");
    if (!root)
        return 0;
    if (device && device->mig != WHOLE)
        snprintf(place, sizeof place, "/gpu%u/mig/%d", device->index, device->mig);
    else if (device)
        snprintf(place, sizeof place, "/gpu%u", device->index);
    return snprintf(out, size, "%s%s/%s", root, place, name) < (int)size;
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

static int device_text(const device_t *device, const char *name, char *out, size_t size)
{
    char path[4096];
    return state_path(path, sizeof path, device, name) && read_text(path, out, size);
}

static int there_is(const device_t *device, const char *name)
{
    char path[4096];
    struct stat found;
    return state_path(path, sizeof path, device, name) && !stat(path, &found);
}

static unsigned device_number(const device_t *device, const char *name)
{
    char text[64];
    return device_text(device, name, text, sizeof text) ? (unsigned)strtoul(text, NULL, 10) : 0;
}

static int injected_at(const device_t *device, const char *call)
{
    char name[64], text[64];
    if (there_is(device, "hang"))
        for (;;)
            pause();
    if (there_is(device, "crash")) {
        signal(SIGSEGV, SIG_DFL);
        raise(SIGSEGV);
    }
    if (device_text(device, "error", text, sizeof text))
        return atoi(text);
    snprintf(name, sizeof name, "error.%s", call);
    return *call && device_text(device, name, text, sizeof text) ? atoi(text) : SUCCESS;
}

/* What the test wants of this call: of the host, of the GPU, of the MIG device. */
static int injected(const device_t *device, const char *call)
{
    if (!initialised)
        return UNINITIALIZED;
    int code = injected_at(NULL, "");
    if (!code && device)
        code = injected_at(&devices[device->index], device->mig == WHOLE ? call : "");
    return !code && device && device->mig != WHOLE ? injected_at(device, call) : code;
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

static unsigned read_list(const device_t *device, const char *list, process_t *out, unsigned count)
{
    char path[4096], text[128];
    if (!state_path(path, sizeof path, device, list))
        return count;
    DIR *directory = opendir(path);
    if (!directory)
        return count;
    for (struct dirent *entry; (entry = readdir(directory)) && count < MAX_HOLDERS;) {
        char *end, name[400];
        unsigned long pid = strtoul(entry->d_name, &end, 10);
        if (*end || end == entry->d_name)
            continue;
        snprintf(name, sizeof name, "%s/%s", list, entry->d_name);
        if (!device_text(device, name, text, sizeof text))
            continue;
        if (strcmp(list, "elsewhere")) {
            bytes_t living = start_time((unsigned)pid), started = 0;
            if (!living || (sscanf(text, "%*s %llu", &started) == 1 && started != living))
                continue;
        }
        bytes_t held = *text == '-' ? NOT_AVAILABLE : strtoull(text, NULL, 10);
        int mig = device->mig != WHOLE;
        out[count++] = (process_t){(unsigned)pid, held, mig ? device_number(device, "gi") : NO_INSTANCE,
                                   mig ? device_number(device, "ci") : NO_INSTANCE};
    }
    closedir(directory);
    return count;
}

/* The whole GPU's list has those of its MIG devices too. */
static unsigned read_processes(const device_t *device, const char *list, process_t *out)
{
    unsigned count = read_list(device, list, out, 0);
    if (!strcmp(list, "holders"))
        count = read_list(device, "elsewhere", out, count);
    for (int i = 0; device->mig == WHOLE && i < MAX_MIG; i++) {
        const device_t *mig = &mig_devices[device->index][i];
        count = read_list(mig, list, out, count);
        if (!strcmp(list, "holders"))
            count = read_list(mig, "elsewhere", out, count);
    }
    return count;
}

static void read_memory(const device_t *device, bytes_t *total, bytes_t *used)
{
    static const char *const lists[] = {"holders", "graphics", "mps"};
    char text[64];
    process_t found[MAX_HOLDERS];
    *total = device_text(device, "total", text, sizeof text) ? strtoull(text, NULL, 10) : 0;
    *used = 0;
    for (unsigned list = 0; list < 3; list++)
        for (unsigned i = 0, count = read_processes(device, lists[list], found); i < count; i++)
            *used += found[i].used == NOT_AVAILABLE ? 0 : found[i].used;
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
    if (!state_path(path, sizeof path, NULL, "init_error"))
        return 9; /* driver not loaded */
    if (read_text(path, text, sizeof text))
        return atoi(text);
    initialised++;
    for (unsigned i = 0; i < MAX_DEVICES; i++) {
        devices[i] = (device_t){i, WHOLE};
        for (int j = 0; j < MAX_MIG; j++)
            mig_devices[i][j] = (device_t){i, j};
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
    int code = injected(NULL, "");
    return code ? code : copy_text(out, length, device_text(NULL, "driver_version", text, sizeof text) ? text : "580.95.05");
}
int nvmlSystemGetNVMLVersion(char *out, unsigned length) { return copy_text(out, length, "13.580.95.05"); }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return injected(NULL, ""); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

int nvmlDeviceGetCount_v2(unsigned *count)
{
    int code = injected(NULL, "");
    if (code)
        return code;
    for (*count = 0; *count < MAX_DEVICES && there_is(&devices[*count], "total");)
        ++*count;
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
    return injected(*device, "");
}
int nvmlDeviceGetHandleByIndex(unsigned index, device_t **device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }

int nvmlDeviceGetHandleByUUID(const char *uuid, device_t **device)
{
    unsigned count;
    char text[128];
    int code = nvmlDeviceGetCount_v2(&count);
    for (unsigned i = 0; !code && i < count; i++)
        if (device_text(&devices[i], "uuid", text, sizeof text) && !strcmp(text, uuid)) {
            *device = &devices[i];
            return SUCCESS;
        }
    return code ? code : NOT_FOUND;
}

int nvmlDeviceGetIndex(device_t *device, unsigned *index)
{
    *index = device->mig == WHOLE ? device->index : (unsigned)device->mig;
    return injected(device, "");
}

static int device_name(device_t *device, const char *file, const char *otherwise, char *out, unsigned length)
{
    char text[128];
    int code = injected(device, file);
    if (code)
        return code;
    return copy_text(out, length, device_text(device, file, text, sizeof text) ? text : otherwise);
}
int nvmlDeviceGetName(device_t *device, char *out, unsigned length)
{
    return device_name(device, "name", "NVIDIA Stand-in", out, length);
}
int nvmlDeviceGetUUID(device_t *device, char *out, unsigned length)
{
    char otherwise[64];
    if (device->mig == WHOLE)
        snprintf(otherwise, sizeof otherwise, "GPU-00000000-0000-0000-0000-%012u", device->index);
    else
        snprintf(otherwise, sizeof otherwise, "MIG-00000000-0000-0000-%04u-%012d", device->index, device->mig);
    return device_name(device, "uuid", otherwise, out, length);
}

int nvmlDeviceGetMemoryInfo(device_t *device, memory_t *out)
{
    int code = injected(device, "memory");
    if (code)
        return code;
    read_memory(device, &out->total, &out->used);
    out->free = out->total - out->used;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(device_t *device, memory_v2_t *out)
{
    memory_t memory;
    int code = nvmlDeviceGetMemoryInfo(device, &memory);
    if (code)
        return code;
    out->total = memory.total, out->free = memory.free, out->used = memory.used, out->reserved = 0;
    return SUCCESS;
}

static int list_processes(device_t *device, const char *call, const char *list, unsigned *count, process_t *out)
{
    process_t holders[MAX_HOLDERS];
    int code = injected(device, call);
    if (code)
        return code;
    unsigned found = read_processes(device, list, holders), room = out ? *count : 0;
    *count = found;
    if (found > room)
        return INSUFFICIENT_SIZE;
    if (found)
        memcpy(out, holders, found * sizeof *out);
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(device_t *device, unsigned *count, process_t *out)
{
    return list_processes(device, "processes", "holders", count, out);
}
int nvmlDeviceGetComputeRunningProcesses_v2(device_t *device, unsigned *count, process_t *out)
{
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, out);
}
int nvmlDeviceGetComputeRunningProcesses(device_t *device, unsigned *count, process_v1_t *out)
{
    process_t holders[MAX_HOLDERS];
    unsigned room = out ? *count : 0;
    *count = MAX_HOLDERS;
    int code = nvmlDeviceGetComputeRunningProcesses_v3(device, count, holders);
    if (code)
        return code;
    if (*count > room)
        return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++)
        out[i] = (process_v1_t){holders[i].pid, holders[i].used};
    return SUCCESS;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(device_t *device, unsigned *count, process_t *out)
{
    return list_processes(device, "graphics", "graphics", count, out);
}
int nvmlDeviceGetGraphicsRunningProcesses_v2(device_t *device, unsigned *count, process_t *out)
{
    return nvmlDeviceGetGraphicsRunningProcesses_v3(device, count, out);
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(device_t *device, unsigned *count, process_t *out)
{
    return list_processes(device, "mps", "mps", count, out);
}

int nvmlDeviceGetMigMode(device_t *device, unsigned *current, unsigned *pending)
{
    int code = injected(device, "mig");
    if (code)
        return code;
    if (device->mig != WHOLE || !there_is(device, "mig"))
        return NOT_SUPPORTED;
    *current = *pending = 1;
    return SUCCESS;
}
int nvmlDeviceGetMaxMigDeviceCount(device_t *device, unsigned *count)
{
    *count = there_is(device, "mig") ? MAX_MIG : 0;
    return injected(device, "mig");
}
int nvmlDeviceGetMigDeviceHandleByIndex(device_t *device, unsigned index, device_t **out)
{
    int code = injected(device, "mig");
    if (code)
        return code;
    if (index >= MAX_MIG)
        return INVALID_ARGUMENT;
    *out = &mig_devices[device->index][index];
    return there_is(*out, "total") ? SUCCESS : NOT_FOUND;
}
int nvmlDeviceIsMigDeviceHandle(device_t *device, unsigned *is_mig)
{
    *is_mig = device->mig != WHOLE;
    return injected(device, "");
}
int nvmlDeviceGetGpuInstanceId(device_t *device, unsigned *id)
{
    *id = device_number(device, "gi");
    return device->mig == WHOLE ? NOT_SUPPORTED : injected(device, "");
}
int nvmlDeviceGetComputeInstanceId(device_t *device, unsigned *id)
{
    *id = device_number(device, "ci");
    return device->mig == WHOLE ? NOT_SUPPORTED : injected(device, "");
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device_t *device, device_t **parent)
{
    *parent = &devices[device->index];
    return device->mig == WHOLE ? INVALID_ARGUMENT : injected(device, "");
}
