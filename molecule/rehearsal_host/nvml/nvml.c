/* SPDX-License-Identifier: GPL-3.0-or-later
 * A stand-in for libnvidia-ml.so.1 on a host without GPUs. It answers the calls that the public Python
 * binding (nvidia-ml-py) makes, from a description of the GPUs (README.md beside this file), so that
 * everything above the library is the real thing. It is no part of the product: only the rehearsal host
 * and the tests load it.
 *
 * Build: see build.sh. DRIVER_VERSION is the version that this library claims to belong to; when the
 * loaded module (driver.loaded_version_file) has another one, every start fails with the library's
 * version-mismatch code, as after an upgrade without a reboot. */
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <strings.h>
#include <unistd.h>

#include "json.h"

#ifndef DRIVER_VERSION
#define DRIVER_VERSION "580.95.05"
#endif
#define API __attribute__((visibility("default")))
#define MAX_GPUS 32
#define MAX_PROCESSES 256
#define MIB 1048576ULL

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15, RESET_REQUIRED = 16,
    LIB_RM_VERSION_MISMATCH = 18, NO_DATA = 21, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999
};

typedef struct gpu {
    int index; /* in NVML's order: missing GPUs do not count */
    const json *own;
} gpu;

typedef struct process {
    unsigned pid;
    unsigned long long used;
    char name[128];
} process;

static struct {
    int started;
    json *tree;
    const json *defaults;
    gpu gpus[MAX_GPUS];
    unsigned count;
    char loaded[64];
} state;
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;

static const struct { int code; const char *name, *text; } errors[] = {
    {OK, "ok", "Success"},
    {UNINITIALIZED, "uninitialized", "Uninitialized"},
    {INVALID_ARGUMENT, "invalid_argument", "Invalid Argument"},
    {NOT_SUPPORTED, "not_supported", "Not Supported"},
    {NO_PERMISSION, "no_permission", "Insufficient Permissions"},
    {NOT_FOUND, "not_found", "Not Found"},
    {INSUFFICIENT_SIZE, "insufficient_size", "Insufficient Size"},
    {DRIVER_NOT_LOADED, "driver_not_loaded", "Driver Not Loaded"},
    {TIMEOUT, "timeout", "Timeout"},
    {GPU_IS_LOST, "lost", "GPU is lost"},
    {RESET_REQUIRED, "reset_required", "GPU requires reset"},
    {LIB_RM_VERSION_MISMATCH, "version_mismatch", "Driver/library version mismatch"},
    {NO_DATA, "no_data", "No data"},
    {ARGUMENT_VERSION_MISMATCH, "argument_version_mismatch", "API version mismatch"},
    {UNKNOWN, "unknown", "Unknown Error"},
};

static const char *from_environment(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

static int error_of(const char *name) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (!strcmp(errors[i].name, name)) return errors[i].code;
    return UNKNOWN;
}

/* A value of a GPU: its own, or that of "defaults". */
static const json *value_of(const gpu *device, const char *key) {
    const json *item = json_get(device->own, key);
    return item ? item : json_get(state.defaults, key);
}

static const char *text_of(const gpu *device, const char *key, const char *otherwise) {
    const json *item = value_of(device, key);
    return item && item->kind == JSON_STRING ? item->text : otherwise;
}

static double number_of(const gpu *device, const char *key, double otherwise) {
    const json *item = value_of(device, key);
    return item && (item->kind == JSON_NUMBER || item->kind == JSON_BOOL) ? item->number : otherwise;
}

static int put(char *out, unsigned room, const char *text) {
    if (!out) return INVALID_ARGUMENT;
    if (strlen(text) + 1 > room) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return OK;
}

/* Is the query answered? "fault" spoils the whole GPU (its place on the bus stays known), "errors" single queries. */
static int allowed(const gpu *device, const char *query) {
    const char *fault, *error;
    if (!state.started) return UNINITIALIZED;
    if (!device || device < state.gpus || device >= state.gpus + state.count) return INVALID_ARGUMENT;
    fault = json_text(device->own, "fault", "");
    if ((!strcmp(fault, "lost") || !strcmp(fault, "reset_required")) && strcmp(query, "pci")
        && strcmp(query, "minor") && strcmp(query, "index"))
        return error_of(fault);
    error = json_text(value_of(device, "errors"), query, NULL);
    return error ? error_of(error) : OK;
}

#define ASK(device, query) do { int denied = allowed((device), (query)); if (denied) return denied; } while (0)

static void loaded_version(void) {
    const json *driver = json_get(state.tree, "driver");
    const char *path = json_text(driver, "loaded_version_file", NULL);
    char line[512], *word, *rest;
    FILE *file;
    snprintf(state.loaded, sizeof state.loaded, "%s", json_text(driver, "loaded_version", path ? "" : DRIVER_VERSION));
    if (!path || !(file = fopen(path, "r"))) return;
    while (fgets(line, sizeof line, file)) {
        if (strncmp(line, "NVRM version:", 13)) continue;
        for (word = strtok_r(line, " \t\n", &rest); word; word = strtok_r(NULL, " \t\n", &rest)) {
            if (isdigit((unsigned char)*word) && strchr(word, '.')) {
                snprintf(state.loaded, sizeof state.loaded, "%s", word);
                break;
            }
        }
    }
    fclose(file);
}

static int start(void) {
    const json *item;
    json *tree = json_parse_file(from_environment("REHEARSAL_GPUS", "/etc/rehearsal/gpus.json"));
    if (!tree) return DRIVER_NOT_LOADED;
    json_free(state.tree);
    state.tree = tree;
    state.defaults = json_get(tree, "defaults");
    state.count = 0;
    item = json_get(tree, "gpus");
    for (item = item ? item->child : NULL; item && state.count < MAX_GPUS; item = item->next) {
        if (!strcmp(json_text(item, "fault", ""), "missing")) continue;
        state.gpus[state.count].index = (int)state.count;
        state.gpus[state.count++].own = item;
    }
    loaded_version();
    if (!state.loaded[0]) return DRIVER_NOT_LOADED;
    if (strcmp(state.loaded, DRIVER_VERSION)) return LIB_RM_VERSION_MISMATCH;
    return OK;
}

API int nvmlInitWithFlags(unsigned flags) {
    int result = OK;
    (void)flags;
    pthread_mutex_lock(&gate);
    if (!state.started) result = start();
    if (result == OK) state.started++;
    pthread_mutex_unlock(&gate);
    return result;
}
API int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API int nvmlInit(void) { return nvmlInitWithFlags(0); }

API int nvmlShutdown(void) {
    int result = UNINITIALIZED;
    pthread_mutex_lock(&gate);
    if (state.started) { state.started--; result = OK; }
    pthread_mutex_unlock(&gate);
    return result;
}

API const char *nvmlErrorString(int code) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return errors[i].text;
    return "Unknown Error";
}

/* ---- the system ---- */
API int nvmlSystemGetDriverVersion(char *out, unsigned room) { return state.started ? put(out, room, state.loaded) : UNINITIALIZED; }
API int nvmlSystemGetNVMLVersion(char *out, unsigned room) { return put(out, room, "13." DRIVER_VERSION); }
API int nvmlSystemGetCudaDriverVersion(int *out) {
    int major = 13, minor = 0;
    if (!out) return INVALID_ARGUMENT;
    sscanf(json_text(json_get(state.tree, "driver"), "cuda_version", "13.0"), "%d.%d", &major, &minor);
    *out = major * 1000 + minor * 10;
    return OK;
}
API int nvmlSystemGetCudaDriverVersion_v2(int *out) { return nvmlSystemGetCudaDriverVersion(out); }

/* ---- handles ---- */
API int nvmlDeviceGetCount_v2(unsigned *count) {
    if (!state.started) return UNINITIALIZED;
    if (!count) return INVALID_ARGUMENT;
    *count = state.count;
    return OK;
}
API int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu **out) {
    if (!state.started) return UNINITIALIZED;
    if (!out || index >= state.count) return INVALID_ARGUMENT;
    *out = &state.gpus[index];
    return strcmp(json_text((*out)->own, "fault", ""), "lost") ? OK : GPU_IS_LOST;
}
API int nvmlDeviceGetHandleByIndex(unsigned index, gpu **out) { return nvmlDeviceGetHandleByIndex_v2(index, out); }

static int by_text(const char *key, const char *wanted, gpu **out) {
    if (!state.started) return UNINITIALIZED;
    if (!wanted || !out) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < state.count; i++)
        if (!strcasecmp(text_of(&state.gpus[i], key, ""), wanted)) return nvmlDeviceGetHandleByIndex_v2(i, out);
    return NOT_FOUND;
}
API int nvmlDeviceGetHandleByUUID(const char *uuid, gpu **out) { return by_text("uuid", uuid, out); }
API int nvmlDeviceGetHandleBySerial(const char *serial, gpu **out) { return by_text("serial", serial, out); }

static int bus_parts(const char *text, unsigned *domain, unsigned *bus, unsigned *device) {
    unsigned function = 0;
    return text && (sscanf(text, "%x:%x:%x.%x", domain, bus, device, &function) >= 3
        || (*domain = 0, sscanf(text, "%x:%x.%x", bus, device, &function) == 3));
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char *wanted, gpu **out) {
    unsigned a[3] = {0}, b[3] = {0};
    if (!state.started) return UNINITIALIZED;
    if (!out || !bus_parts(wanted, &a[0], &a[1], &a[2])) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < state.count; i++)
        if (bus_parts(text_of(&state.gpus[i], "bus_id", ""), &b[0], &b[1], &b[2]) && !memcmp(a, b, sizeof a))
            return nvmlDeviceGetHandleByIndex_v2(i, out);
    return NOT_FOUND;
}
API int nvmlDeviceGetHandleByPciBusId(const char *wanted, gpu **out) { return nvmlDeviceGetHandleByPciBusId_v2(wanted, out); }

/* ---- what a GPU is ---- */
API int nvmlDeviceGetIndex(gpu *device, unsigned *out) { ASK(device, "index"); *out = (unsigned)device->index; return OK; }
API int nvmlDeviceGetMinorNumber(gpu *device, unsigned *out) { ASK(device, "minor"); *out = (unsigned)number_of(device, "minor", device->index); return OK; }
API int nvmlDeviceGetName(gpu *device, char *out, unsigned room) { ASK(device, "name"); return put(out, room, text_of(device, "name", "GPU")); }
API int nvmlDeviceGetUUID(gpu *device, char *out, unsigned room) { ASK(device, "uuid"); return put(out, room, text_of(device, "uuid", "")); }
API int nvmlDeviceGetSerial(gpu *device, char *out, unsigned room) {
    const char *serial;
    ASK(device, "serial");
    serial = text_of(device, "serial", NULL);
    return serial ? put(out, room, serial) : NOT_SUPPORTED;
}
API int nvmlDeviceGetVbiosVersion(gpu *device, char *out, unsigned room) { ASK(device, "vbios"); return put(out, room, text_of(device, "vbios", "98.02.00.00.00")); }
API int nvmlDeviceGetBrand(gpu *device, unsigned *out) { ASK(device, "name"); *out = 13; return OK; }
API int nvmlDeviceGetArchitecture(gpu *device, unsigned *out) { ASK(device, "name"); *out = 10; return OK; }
API int nvmlDeviceGetCudaComputeCapability(gpu *device, int *major, int *minor) {
    ASK(device, "compute_capability");
    return sscanf(text_of(device, "compute_capability", "12.0"), "%d.%d", major, minor) == 2 ? OK : NOT_SUPPORTED;
}

struct pci {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
};
API int nvmlDeviceGetPciInfo_v3(gpu *device, struct pci *out) {
    ASK(device, "pci");
    if (!out || !bus_parts(text_of(device, "bus_id", ""), &out->domain, &out->bus, &out->device)) return UNKNOWN;
    snprintf(out->legacy, sizeof out->legacy, "%04X:%02X:%02X.0", out->domain & 0xffff, out->bus & 0xff, out->device & 0xff);
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", out->domain, out->bus & 0xff, out->device & 0xff);
    out->id = (unsigned)strtoul(text_of(device, "pci_device", "0x2bb510de"), NULL, 16);
    out->subsystem = (unsigned)strtoul(text_of(device, "pci_subsystem", "0x204b10de"), NULL, 16);
    return OK;
}
API int nvmlDeviceGetPciInfo_v2(gpu *device, struct pci *out) { return nvmlDeviceGetPciInfo_v3(device, out); }
API int nvmlDeviceGetPciInfo(gpu *device, struct pci *out) { return nvmlDeviceGetPciInfo_v3(device, out); }

static int whole(gpu *device, const char *query, double otherwise, unsigned *out) {
    const json *item;
    ASK(device, query);
    if (!out) return INVALID_ARGUMENT;
    item = value_of(device, query);
    if (item && item->kind == JSON_STRING) return error_of(item->text);
    *out = (unsigned)number_of(device, query, otherwise);
    return OK;
}
API int nvmlDeviceGetCurrPcieLinkGeneration(gpu *device, unsigned *out) { return whole(device, "pcie_generation", 5, out); }
API int nvmlDeviceGetMaxPcieLinkGeneration(gpu *device, unsigned *out) { return whole(device, "pcie_generation_max", 5, out); }
API int nvmlDeviceGetGpuMaxPcieLinkGeneration(gpu *device, unsigned *out) { return whole(device, "pcie_generation_max", 5, out); }
API int nvmlDeviceGetCurrPcieLinkWidth(gpu *device, unsigned *out) { return whole(device, "pcie_width", 16, out); }
API int nvmlDeviceGetMaxPcieLinkWidth(gpu *device, unsigned *out) { return whole(device, "pcie_width_max", 16, out); }

/* ---- NUMA ---- */
API int nvmlDeviceGetNumaNodeId(gpu *device, int *out) {
    int node;
    ASK(device, "numa_node");
    node = (int)number_of(device, "numa_node", -1);
    if (node < 0) return NOT_SUPPORTED;
    *out = node;
    return OK;
}
API int nvmlDeviceGetMemoryAffinity(gpu *device, unsigned words, unsigned long *set, unsigned scope) {
    int node;
    (void)scope;
    ASK(device, "numa_node");
    node = (int)number_of(device, "numa_node", -1);
    if (node < 0) return NOT_SUPPORTED;
    if (!set || (unsigned)node >= words * 64) return INSUFFICIENT_SIZE;
    memset(set, 0, words * sizeof *set);
    set[node / 64] = 1UL << (node % 64);
    return OK;
}
API int nvmlDeviceGetCpuAffinity(gpu *device, unsigned words, unsigned long *set) {
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    ASK(device, "cpu_affinity");
    if (!set) return INVALID_ARGUMENT;
    memset(set, 0, words * sizeof *set);
    for (long i = 0; i < cpus && i < (long)words * 64; i++) set[i / 64] |= 1UL << (i % 64);
    return OK;
}

/* ---- processes: files that live processes left in the run directory ---- */
static int names_gpu(const json *list, const char *uuid) {
    const json *item = list && list->kind == JSON_ARRAY ? list->child : NULL;
    for (; item; item = item->next)
        if (item->kind == JSON_STRING && !strcasecmp(item->text, uuid)) return 1;
    return 0;
}

static unsigned processes_of(const gpu *device, process *out) {
    const char *folder = from_environment("REHEARSAL_GPU_PROCESSES", "/run/rehearsal/gpu-processes");
    const char *uuid = text_of(device, "uuid", "");
    DIR *listing = opendir(folder);
    struct dirent *entry;
    unsigned count = 0;
    while (listing && count < MAX_PROCESSES && (entry = readdir(listing))) {
        char path[1024];
        size_t length = strlen(entry->d_name);
        json *tree;
        const json *pid, *used;
        if (length < 6 || strcmp(entry->d_name + length - 5, ".json")) continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (!(tree = json_parse_file(path))) continue;
        pid = json_get(tree, "pid");
        used = json_get(tree, "used_mib_per_gpu");
        if (pid && pid->kind == JSON_NUMBER && pid->number > 1 && names_gpu(json_get(tree, "gpus"), uuid)
            && (!kill((pid_t)pid->number, 0) || errno == EPERM)) {
            out[count].pid = (unsigned)pid->number;
            out[count].used = used && used->kind == JSON_NUMBER ? (unsigned long long)used->number * MIB : 0;
            snprintf(out[count].name, sizeof out[count].name, "%s", json_text(tree, "name", ""));
            count++;
        }
        json_free(tree);
    }
    if (listing) closedir(listing);
    return count;
}

struct process_info {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};
API int nvmlDeviceGetComputeRunningProcesses_v3(gpu *device, unsigned *count, struct process_info *out) {
    process found[MAX_PROCESSES];
    unsigned n;
    ASK(device, "processes");
    if (!count) return INVALID_ARGUMENT;
    n = processes_of(device, found);
    if (n > *count || (n && !out)) { *count = n; return INSUFFICIENT_SIZE; }
    *count = n;
    for (unsigned i = 0; i < n; i++)
        out[i] = (struct process_info){found[i].pid, found[i].used, 0xffffffffu, 0xffffffffu};
    return OK;
}
API int nvmlDeviceGetComputeRunningProcesses_v2(gpu *d, unsigned *c, struct process_info *o) { return nvmlDeviceGetComputeRunningProcesses_v3(d, c, o); }
static int none(gpu *device, unsigned *count) {
    ASK(device, "processes");
    if (!count) return INVALID_ARGUMENT;
    *count = 0;
    return OK;
}
API int nvmlDeviceGetGraphicsRunningProcesses_v3(gpu *d, unsigned *c, struct process_info *o) { (void)o; return none(d, c); }
API int nvmlDeviceGetGraphicsRunningProcesses_v2(gpu *d, unsigned *c, struct process_info *o) { (void)o; return none(d, c); }
API int nvmlDeviceGetMPSComputeRunningProcesses_v3(gpu *d, unsigned *c, struct process_info *o) { (void)o; return none(d, c); }

API int nvmlSystemGetProcessName(unsigned pid, char *out, unsigned room) {
    process found[MAX_PROCESSES];
    if (!state.started) return UNINITIALIZED;
    for (unsigned i = 0; i < state.count; i++) {
        unsigned n = processes_of(&state.gpus[i], found);
        for (unsigned k = 0; k < n; k++)
            if (found[k].pid == pid) return put(out, room, found[k].name);
    }
    return NOT_FOUND;
}

/* ---- memory: what the description says is in use, plus what the registered processes hold ---- */
static unsigned long long memory_used(const gpu *device, unsigned long long total) {
    process found[MAX_PROCESSES];
    unsigned long long used = (unsigned long long)number_of(device, "memory_used_mib", 4) * MIB;
    unsigned n = processes_of(device, found);
    for (unsigned i = 0; i < n; i++) used += found[i].used;
    return used > total ? total : used;
}
struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
API int nvmlDeviceGetMemoryInfo(gpu *device, struct memory *out) {
    ASK(device, "memory");
    if (!out) return INVALID_ARGUMENT;
    out->total = (unsigned long long)number_of(device, "memory_total_mib", 97887) * MIB;
    out->used = memory_used(device, out->total);
    out->free = out->total - out->used;
    return OK;
}
API int nvmlDeviceGetMemoryInfo_v2(gpu *device, struct memory_v2 *out) {
    struct memory plain;
    int result;
    if (!out) return INVALID_ARGUMENT;
    if (out->version != 0x02000028u) return ARGUMENT_VERSION_MISMATCH;
    if ((result = nvmlDeviceGetMemoryInfo(device, &plain))) return result;
    out->total = plain.total;
    out->reserved = 0;
    out->free = plain.free;
    out->used = plain.used;
    return OK;
}
API int nvmlDeviceGetBAR1MemoryInfo(gpu *device, struct memory *out) {
    ASK(device, "bar1");
    if (!out) return INVALID_ARGUMENT;
    out->total = (unsigned long long)number_of(device, "bar1_total_mib", 131072) * MIB;
    out->used = MIB;
    out->free = out->total - out->used;
    return OK;
}

/* ---- modes, power, load ---- */
static int enabled(const gpu *device, const char *key, int otherwise) {
    const json *item = value_of(device, key);
    return item && item->kind == JSON_BOOL ? item->number != 0 : otherwise;
}
API int nvmlDeviceGetEccMode(gpu *device, unsigned *now, unsigned *pending) {
    ASK(device, "ecc");
    *now = *pending = (unsigned)enabled(device, "ecc", 1);
    return OK;
}
/* Persistence is on while the persistence daemon runs, unless the description says true or false. */
API int nvmlDeviceGetPersistenceMode(gpu *device, unsigned *out) {
    ASK(device, "persistence");
    *out = (unsigned)enabled(device, "persistence", !access("/run/nvidia-persistenced/socket", F_OK));
    return OK;
}
API int nvmlDeviceGetMigMode(gpu *device, unsigned *now, unsigned *pending) {
    ASK(device, "mig");
    *now = *pending = (unsigned)enabled(device, "mig", 0);
    return OK;
}
API int nvmlDeviceGetComputeMode(gpu *device, unsigned *out) { ASK(device, "compute_mode"); *out = 0; return OK; }

static int milliwatts(gpu *device, const char *query, double watts, unsigned *out) {
    ASK(device, query);
    if (!out) return INVALID_ARGUMENT;
    *out = (unsigned)(number_of(device, query, watts) * 1000.0 + 0.5);
    return OK;
}
API int nvmlDeviceGetPowerUsage(gpu *device, unsigned *out) { return milliwatts(device, "power_draw_w", 31.0, out); }
API int nvmlDeviceGetPowerManagementLimit(gpu *device, unsigned *out) { return milliwatts(device, "power_limit_w", 600.0, out); }
API int nvmlDeviceGetEnforcedPowerLimit(gpu *device, unsigned *out) { return milliwatts(device, "power_limit_w", 600.0, out); }
API int nvmlDeviceGetPowerManagementDefaultLimit(gpu *device, unsigned *out) { return milliwatts(device, "power_default_w", 600.0, out); }
API int nvmlDeviceGetPowerManagementLimitConstraints(gpu *device, unsigned *low, unsigned *high) {
    int result = milliwatts(device, "power_min_w", 150.0, low);
    return result ? result : milliwatts(device, "power_max_w", 600.0, high);
}
API int nvmlDeviceGetTemperature(gpu *device, unsigned sensor, unsigned *out) { (void)sensor; return whole(device, "temperature_c", 31, out); }
struct temperature { unsigned version, sensor; int value; };
API int nvmlDeviceGetTemperatureV(gpu *device, struct temperature *out) {
    unsigned value = 0;
    int result;
    if (!out) return INVALID_ARGUMENT;
    if (out->version != 0x0100000Cu) return ARGUMENT_VERSION_MISMATCH;
    result = whole(device, "temperature_c", 31, &value);
    out->value = (int)value;
    return result;
}
struct utilization { unsigned gpu, memory; };
API int nvmlDeviceGetUtilizationRates(gpu *device, struct utilization *out) {
    if (!out) return INVALID_ARGUMENT;
    out->memory = 0;
    return whole(device, "utilization_percent", 0, &out->gpu);
}

/* ---- between GPUs ---- */
static const char *const p2p_status[] = {"ok", "chipset_not_supported", "gpu_not_supported", "topology_not_supported",
                                         "disabled_by_regkey", "not_supported", "unknown"};
static int pair_matches(const json *rule, const gpu *a, const gpu *b) {
    const json *list = json_get(rule, "gpus"), *item = list ? list->child : NULL;
    int seen_a = 0, seen_b = 0;
    for (; item; item = item->next) {
        seen_a |= item->kind == JSON_NUMBER && (int)item->number == a->index;
        seen_b |= item->kind == JSON_NUMBER && (int)item->number == b->index;
    }
    return !list || (seen_a && seen_b);
}
API int nvmlDeviceGetP2PStatus(gpu *a, gpu *b, unsigned what, unsigned *out) {
    static const char *const capability[] = {"read", "write", "nvlink", "atomics", "pci"};
    const json *rules = json_get(state.tree, "p2p"), *rule = rules ? rules->child : NULL;
    const char *text = NULL;
    ASK(a, "p2p");
    ASK(b, "p2p");
    if (!out || what > 4 || a == b) return INVALID_ARGUMENT;
    for (; rule; rule = rule->next) /* the last rule that fits wins */
        if (pair_matches(rule, a, b) && json_text(rule, capability[what], NULL)) text = json_text(rule, capability[what], NULL);
    if (!text) text = what == 2 ? "not_supported" : "ok";
    *out = 6;
    for (unsigned i = 0; i < sizeof p2p_status / sizeof *p2p_status; i++)
        if (!strcmp(p2p_status[i], text)) *out = i;
    return OK;
}
API int nvmlDeviceGetTopologyCommonAncestor(gpu *a, gpu *b, unsigned *out) {
    ASK(a, "p2p");
    ASK(b, "p2p");
    if (!out) return INVALID_ARGUMENT;
    *out = number_of(a, "numa_node", -1) == number_of(b, "numa_node", -1) ? 40 : 50;
    return OK;
}
