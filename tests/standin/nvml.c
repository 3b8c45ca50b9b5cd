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
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { MAX_MIG = 7, FIRST_MIG = 1000, MAX_DEVICES = 16, MAX_HOLDERS = 256 };

typedef unsigned long long bytes_t;
typedef struct { unsigned index; } device_t;
typedef struct { bytes_t total, free, used; } memory_t;
typedef struct { unsigned version; bytes_t total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned pid; bytes_t used; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { unsigned pid; bytes_t used; } process_v1_t;

static device_t devices[MAX_DEVICES], mig_devices[MAX_DEVICES * MAX_MIG];
static int initialised;

static int state_path(char *out, size_t size, const char *format, unsigned index, const char *rest)
{
    char inner[512];
    const char *root = getenv("SUPERVISOR_VLLM_TEST_GPUS");
    if (!root)
        return 0;
    snprintf(inner, sizeof inner, format, index, rest);
    return snprintf(out, size, "%s/%s", root, inner) < (int)size;
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

static int device_text(unsigned index, const char *name, char *out, size_t size)
{
    char path[4096];
    return state_path(path, sizeof path, "gpu%u/%s", index, name) && read_text(path, out, size);
}

static int injected(const device_t *device)
{
    char path[4096], text[64];
    if (!initialised)
        return UNINITIALIZED;
    if (state_path(path, sizeof path, "error%.0u%s", 0, "") && read_text(path, text, sizeof text))
        return atoi(text);
    if (device && device_text(device->index, "error", text, sizeof text))
        return atoi(text);
    return SUCCESS;
}

/* A return code for one call: gpu<N>/error.<call> */
static int injected_call(const device_t *device, const char *call)
{
    char name[64], text[64];
    int code = injected(device);
    snprintf(name, sizeof name, "error.%s", call);
    return !code && device_text(device->index, name, text, sizeof text) ? atoi(text) : code;
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

static unsigned read_holders(unsigned index, process_t *out)
{
    char path[4096], text[128];
    unsigned count = 0;
    if (!state_path(path, sizeof path, "gpu%u/%s", index, "holders"))
        return 0;
    DIR *directory = opendir(path);
    if (!directory)
        return 0;
    for (struct dirent *entry; (entry = readdir(directory)) && count < MAX_HOLDERS;) {
        char *end, name[300];
        unsigned long pid = strtoul(entry->d_name, &end, 10);
        if (*end || end == entry->d_name)
            continue;
        bytes_t living = start_time((unsigned)pid), held = 0, started = 0;
        snprintf(name, sizeof name, "holders/%s", entry->d_name);
        if (!living || !device_text(index, name, text, sizeof text))
            continue;
        if (sscanf(text, "%llu %llu", &held, &started) == 2 && started != living)
            continue;
        out[count++] = (process_t){(unsigned)pid, held, 0xFFFFFFFFu, 0xFFFFFFFFu};
    }
    closedir(directory);
    return count;
}

static void read_memory(unsigned index, bytes_t *total, bytes_t *used)
{
    char text[64];
    process_t holders[MAX_HOLDERS];
    *total = device_text(index, "total", text, sizeof text) ? strtoull(text, NULL, 10) : 0;
    *used = 0;
    for (unsigned i = 0, count = read_holders(index, holders); i < count; i++)
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
    if (!state_path(path, sizeof path, "init_error%.0u%s", 0, ""))
        return 9; /* driver not loaded */
    if (read_text(path, text, sizeof text))
        return atoi(text);
    initialised++;
    for (unsigned i = 0; i < MAX_DEVICES; i++)
        devices[i].index = i;
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
    int code = injected(NULL);
    return code ? code : copy_text(out, length, "580.95.05");
}
int nvmlSystemGetNVMLVersion(char *out, unsigned length) { return copy_text(out, length, "13.580.95.05"); }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return injected(NULL); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

int nvmlDeviceGetCount_v2(unsigned *count)
{
    char text[64];
    int code = injected(NULL);
    if (code)
        return code;
    for (*count = 0; *count < MAX_DEVICES && device_text(*count, "total", text, sizeof text);)
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
    return injected(*device);
}
int nvmlDeviceGetHandleByIndex(unsigned index, device_t **device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }

int nvmlDeviceGetHandleByUUID(const char *uuid, device_t **device)
{
    unsigned count;
    char text[128];
    int code = nvmlDeviceGetCount_v2(&count);
    for (unsigned i = 0; !code && i < count; i++)
        if (device_text(i, "uuid", text, sizeof text) && !strcmp(text, uuid)) {
            *device = &devices[i];
            return SUCCESS;
        }
    return code ? code : NOT_FOUND;
}

int nvmlDeviceGetIndex(device_t *device, unsigned *index) { *index = device->index; return injected(device); }

static int device_name(device_t *device, const char *file, const char *otherwise, char *out, unsigned length)
{
    char text[128];
    int code = injected(device);
    if (code)
        return code;
    return copy_text(out, length, device_text(device->index, file, text, sizeof text) ? text : otherwise);
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

/* MIG: gpu<N>/mig says that the mode is on; gpu<1000+7N+i> is its MIG device i. */
int nvmlDeviceGetMigMode(device_t *device, unsigned *current, unsigned *pending)
{
    char text[8];
    int code = injected(device);
    *current = *pending = device_text(device->index, "mig", text, sizeof text);
    return code ? code : *current ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetMaxMigDeviceCount(device_t *device, unsigned *count) { *count = MAX_MIG; return injected(device); }
int nvmlDeviceGetMigDeviceHandleByIndex(device_t *device, unsigned index, device_t **out)
{
    char text[64];
    unsigned place = device->index * MAX_MIG + index;
    if (index >= MAX_MIG || !device_text(FIRST_MIG + place, "total", text, sizeof text))
        return NOT_FOUND;
    mig_devices[place].index = FIRST_MIG + place;
    *out = &mig_devices[place];
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(device_t *device, memory_t *out)
{
    int code = injected_call(device, "memory");
    if (code)
        return code;
    read_memory(device->index, &out->total, &out->used);
    out->free = out->total - out->used;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(device_t *device, memory_v2_t *out)
{
    int code = injected(device);
    if (code)
        return code;
    read_memory(device->index, &out->total, &out->used);
    out->free = out->total - out->used;
    out->reserved = 0;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(device_t *device, unsigned *count, process_t *out)
{
    process_t holders[MAX_HOLDERS];
    int code = injected_call(device, "processes");
    if (code)
        return code;
    unsigned found = read_holders(device->index, holders), room = out ? *count : 0;
    *count = found;
    if (found > room)
        return INSUFFICIENT_SIZE;
    if (found)
        memcpy(out, holders, found * sizeof *out);
    return SUCCESS;
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

static int no_processes(device_t *device, unsigned *count) { *count = 0; return injected(device); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(device_t *d, unsigned *count, void *out) { (void)out; return no_processes(d, count); }
int nvmlDeviceGetGraphicsRunningProcesses_v2(device_t *d, unsigned *count, void *out) { (void)out; return no_processes(d, count); }
int nvmlDeviceGetGraphicsRunningProcesses(device_t *d, unsigned *count, void *out) { (void)out; return no_processes(d, count); }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(device_t *d, unsigned *count, void *out) { (void)out; return no_processes(d, count); }

