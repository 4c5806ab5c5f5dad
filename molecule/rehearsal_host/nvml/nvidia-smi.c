/* SPDX-License-Identifier: GPL-3.0-or-later
 * A small stand-in for nvidia-smi. It asks libnvidia-ml.so.1 by dlopen, as the real one does, so a missing
 * library, a driver that is not loaded and a version mismatch come out of the library, not out of this file. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define MIB 1048576ULL
typedef void *device;
struct memory { unsigned long long total, free, used; };
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
struct process { unsigned pid; unsigned long long used; unsigned gi, ci; };
struct load { unsigned gpu, memory; };

static void *library;
typedef int (*fn0)(void);
typedef int (*fn1)(void *);
typedef int (*fn2)(void *, void *);
typedef int (*fn3)(void *, void *, void *);
typedef int (*text1)(void *, unsigned);
typedef int (*text2)(void *, char *, unsigned);

static void *need(const char *name) {
    void *symbol = dlsym(library, name);
    if (!symbol) { fprintf(stderr, "Failed to find %s in libnvidia-ml.so.1\n", name); exit(13); }
    return symbol;
}

/* The text in brackets that stands for a value which there is none of. */
static const char *no_value(int code) {
    switch (code) {
    case 3: return "[N/A]";
    case 15: return "[GPU is lost]";
    case 16: return "[GPU requires reset]";
    case 4: return "[Insufficient Permissions]";
    default: return "[Unknown Error]";
    }
}

static const char *words[] = {"Disabled", "Enabled"};

/* One field of --query-gpu; the unit is appended unless nounits. Returns 0 for an unknown name. */
static int field(unsigned index, device gpu, const char *name, int units, char *out, size_t room) {
    int code = 0;
    unsigned number = 0, other = 0;
    struct memory memory = {0, 0, 0};
    struct pci pci;
    struct load load = {0, 0};
    char text[128] = "";
    const char *unit = "";
    enum { TEXT, COUNT, WORD, WATTS } kind = COUNT;

    memset(&pci, 0, sizeof pci);
    if (!strcmp(name, "index")) number = index;
    else if (!strcmp(name, "count")) ((fn1)need("nvmlDeviceGetCount_v2"))(&number);
    else if (!strcmp(name, "uuid") || !strcmp(name, "gpu_uuid")) { kind = TEXT; code = ((text2)need("nvmlDeviceGetUUID"))(gpu, text, sizeof text); }
    else if (!strcmp(name, "name") || !strcmp(name, "gpu_name")) { kind = TEXT; code = ((text2)need("nvmlDeviceGetName"))(gpu, text, sizeof text); }
    else if (!strcmp(name, "serial")) { kind = TEXT; code = ((text2)need("nvmlDeviceGetSerial"))(gpu, text, sizeof text); }
    else if (!strcmp(name, "pci.bus_id") || !strcmp(name, "gpu_bus_id")) {
        kind = TEXT; code = ((fn2)need("nvmlDeviceGetPciInfo_v3"))(gpu, &pci); snprintf(text, sizeof text, "%s", pci.bus_id);
    } else if (!strcmp(name, "pci.device_id")) {
        kind = TEXT; code = ((fn2)need("nvmlDeviceGetPciInfo_v3"))(gpu, &pci); snprintf(text, sizeof text, "0x%08X", pci.id);
    } else if (!strcmp(name, "driver_version")) { kind = TEXT; code = ((text1)need("nvmlSystemGetDriverVersion"))(text, sizeof text); }
    else if (!strcmp(name, "compute_cap")) {
        kind = TEXT; code = ((fn3)need("nvmlDeviceGetCudaComputeCapability"))(gpu, &number, &other); snprintf(text, sizeof text, "%u.%u", number, other);
    } else if (!strncmp(name, "memory.", 7)) {
        unit = " MiB"; code = ((fn2)need("nvmlDeviceGetMemoryInfo"))(gpu, &memory);
        if (!strcmp(name, "memory.total")) number = (unsigned)(memory.total / MIB);
        else if (!strcmp(name, "memory.used")) number = (unsigned)(memory.used / MIB);
        else if (!strcmp(name, "memory.free")) number = (unsigned)(memory.free / MIB);
        else return 0;
    } else if (!strcmp(name, "utilization.gpu")) { unit = " %"; code = ((fn2)need("nvmlDeviceGetUtilizationRates"))(gpu, &load); number = load.gpu; }
    else if (!strcmp(name, "temperature.gpu")) code = ((fn3)need("nvmlDeviceGetTemperature"))(gpu, NULL, &number);
    else if (!strcmp(name, "power.draw")) { unit = " W"; kind = WATTS; code = ((fn2)need("nvmlDeviceGetPowerUsage"))(gpu, &number); }
    else if (!strcmp(name, "power.limit")) { unit = " W"; kind = WATTS; code = ((fn2)need("nvmlDeviceGetPowerManagementLimit"))(gpu, &number); }
    else if (!strcmp(name, "power.default_limit")) { unit = " W"; kind = WATTS; code = ((fn2)need("nvmlDeviceGetPowerManagementDefaultLimit"))(gpu, &number); }
    else if (!strcmp(name, "persistence_mode")) { kind = WORD; code = ((fn2)need("nvmlDeviceGetPersistenceMode"))(gpu, &number); }
    else if (!strcmp(name, "ecc.mode.current")) { kind = WORD; code = ((fn3)need("nvmlDeviceGetEccMode"))(gpu, &number, &other); }
    else if (!strcmp(name, "mig.mode.current")) { kind = WORD; code = ((fn3)need("nvmlDeviceGetMigMode"))(gpu, &number, &other); }
    else if (!strcmp(name, "pcie.link.gen.current") || !strcmp(name, "pcie.link.gen.gpucurrent")) code = ((fn2)need("nvmlDeviceGetCurrPcieLinkGeneration"))(gpu, &number);
    else if (!strcmp(name, "pcie.link.gen.max")) code = ((fn2)need("nvmlDeviceGetMaxPcieLinkGeneration"))(gpu, &number);
    else if (!strcmp(name, "pcie.link.width.current")) code = ((fn2)need("nvmlDeviceGetCurrPcieLinkWidth"))(gpu, &number);
    else if (!strcmp(name, "pcie.link.width.max")) code = ((fn2)need("nvmlDeviceGetMaxPcieLinkWidth"))(gpu, &number);
    else return 0;

    if (code) snprintf(out, room, "%s", no_value(code));
    else if (kind == TEXT) snprintf(out, room, "%s", text);
    else if (kind == WORD) snprintf(out, room, "%s", words[number != 0]);
    else if (kind == WATTS) snprintf(out, room, "%.2f%s", number / 1000.0, units ? unit : "");
    else snprintf(out, room, "%u%s", number, units ? unit : "");
    return 1;
}

static device handle(unsigned index) {
    device gpu = NULL;
    int (*by_index)(unsigned, device *) = (int (*)(unsigned, device *))need("nvmlDeviceGetHandleByIndex_v2");
    int code = by_index(index, &gpu);
    if (code) {
        fprintf(stdout, "Unable to determine the device handle for GPU%u: %s\n", index,
                ((const char *(*)(int))need("nvmlErrorString"))(code));
        exit(code);
    }
    return gpu;
}

static int wanted(const char *selection, unsigned index) {
    char list[256], uuid[128] = "", bus[128] = "", *item, *rest;
    if (!selection) return 1;
    snprintf(list, sizeof list, "%s", selection);
    field(index, handle(index), "uuid", 0, uuid, sizeof uuid);
    field(index, handle(index), "pci.bus_id", 0, bus, sizeof bus);
    for (item = strtok_r(list, ",", &rest); item; item = strtok_r(NULL, ",", &rest)) {
        char *end;
        unsigned long number = strtoul(item, &end, 10);
        if ((!*end && number == index) || !strcasecmp(item, uuid) || !strcasecmp(item, bus)) return 1;
    }
    return 0;
}

static int query(unsigned count, const char *fields, const char *format, const char *selection) {
    int header = !strstr(format, "noheader"), units = !strstr(format, "nounits");
    char list[2048], *name, *rest, value[256];
    for (int row = header ? -1 : 0; row < (int)count; row++) {
        const char *comma = "";
        if (row >= 0 && !wanted(selection, (unsigned)row)) continue;
        snprintf(list, sizeof list, "%s", fields);
        for (name = strtok_r(list, ", ", &rest); name; name = strtok_r(NULL, ", ", &rest), comma = ", ") {
            if (row < 0) { printf("%s%s", comma, name); continue; }
            if (!field((unsigned)row, handle((unsigned)row), name, units, value, sizeof value)) {
                printf("Field \"%s\" is not a valid field to query.\n\n", name);
                return 2;
            }
            printf("%s%s", comma, value);
        }
        putchar('\n');
    }
    return 0;
}

static int query_apps(unsigned count, const char *fields, const char *format) {
    int (*processes)(device, unsigned *, struct process *) = (int (*)(device, unsigned *, struct process *))need("nvmlDeviceGetComputeRunningProcesses_v3");
    int (*name_of)(unsigned, char *, unsigned) = (int (*)(unsigned, char *, unsigned))need("nvmlSystemGetProcessName");
    int units = !strstr(format, "nounits");
    char list[1024], *name, *rest, value[256];
    if (!strstr(format, "noheader")) printf("%s\n", fields);
    for (unsigned i = 0; i < count; i++) {
        struct process found[256];
        unsigned n = 256;
        if (processes(handle(i), &n, found)) continue;
        for (unsigned k = 0; k < n; k++) {
            const char *comma = "";
            snprintf(list, sizeof list, "%s", fields);
            for (name = strtok_r(list, ", ", &rest); name; name = strtok_r(NULL, ", ", &rest), comma = ", ") {
                if (!strcmp(name, "pid")) snprintf(value, sizeof value, "%u", found[k].pid);
                else if (!strcmp(name, "process_name") || !strcmp(name, "name")) {
                    if (name_of(found[k].pid, value, sizeof value)) snprintf(value, sizeof value, "[Not Found]");
                } else if (!strcmp(name, "used_memory") || !strcmp(name, "used_gpu_memory")) snprintf(value, sizeof value, "%llu%s", found[k].used / MIB, units ? " MiB" : "");
                else if (!strcmp(name, "gpu_uuid")) field(i, handle(i), "uuid", units, value, sizeof value);
                else if (!strcmp(name, "gpu_bus_id") || !strcmp(name, "gpu_name")) field(i, handle(i), name, units, value, sizeof value);
                else { printf("Field \"%s\" is not a valid field to query.\n\n", name); return 2; }
                printf("%s%s", comma, value);
            }
            putchar('\n');
        }
    }
    return 0;
}

static int topology(unsigned count, const char *what) {
    static const char *const marks[] = {"OK", "CNS", "GNS", "TNS", "DR", "NS", "U"};
    int (*status)(device, device, unsigned, unsigned *) = (int (*)(device, device, unsigned, unsigned *))need("nvmlDeviceGetP2PStatus");
    unsigned capability = strchr(what, 'w') ? 1 : strchr(what, 'n') ? 2 : strchr(what, 'a') ? 3 : strchr(what, 'p') ? 4 : 0;
    for (unsigned i = 0; i < count; i++) printf("\tGPU%u", i);
    for (unsigned i = 0; i < count; i++) {
        printf("\nGPU%u", i);
        for (unsigned k = 0; k < count; k++) {
            unsigned result = 6;
            if (i != k && status(handle(i), handle(k), capability, &result)) result = 6;
            printf("\t%s", i == k ? "X" : marks[result > 6 ? 6 : result]);
        }
    }
    puts("\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n  GNS  = GPU not supported\n"
         "  TNS  = Topology not supported\n  NS   = Not supported\n  U    = Unknown");
    return 0;
}

static int overview(unsigned count) {
    char driver[80] = "", name[128], bus[128], used[64], total[64], draw[64], load[64];
    int cuda = 0;
    ((text1)need("nvmlSystemGetDriverVersion"))(driver, sizeof driver);
    ((fn1)need("nvmlSystemGetCudaDriverVersion_v2"))(&cuda);
    printf("+-----------------------------------------------------------------------------------------+\n"
           "| NVIDIA-SMI %-22s Driver Version: %-14s CUDA Version: %2d.%d      |\n"
           "+-----------------------------------------------------------------------------------------+\n",
           driver, driver, cuda / 1000, cuda % 1000 / 10);
    for (unsigned i = 0; i < count; i++) {
        device gpu = handle(i);
        field(i, gpu, "name", 1, name, sizeof name);
        field(i, gpu, "pci.bus_id", 1, bus, sizeof bus);
        field(i, gpu, "memory.used", 0, used, sizeof used);
        field(i, gpu, "memory.total", 0, total, sizeof total);
        field(i, gpu, "power.draw", 1, draw, sizeof draw);
        field(i, gpu, "utilization.gpu", 1, load, sizeof load);
        printf("| %2u  %-44.44s %s |\n|     %12s %10s MiB / %s MiB %8s |\n", i, name, bus, draw, used, total, load);
    }
    puts("+-----------------------------------------------------------------------------------------+");
    return 0;
}

int main(int argc, char **argv) {
    const char *fields = NULL, *apps = NULL, *format = "csv", *selection = NULL, *peers = NULL;
    int list = 0, code, result;
    unsigned count = 0;
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "--query-gpu=", 12)) fields = argv[i] + 12;
        else if (!strncmp(argv[i], "--query-compute-apps=", 21)) apps = argv[i] + 21;
        else if (!strncmp(argv[i], "--format=", 9)) format = argv[i] + 9;
        else if (!strncmp(argv[i], "--id=", 5)) selection = argv[i] + 5;
        else if (!strcmp(argv[i], "-i") && i + 1 < argc) selection = argv[++i];
        else if (!strcmp(argv[i], "-L") || !strcmp(argv[i], "--list-gpus")) list = 1;
        else if (!strcmp(argv[i], "topo") && i + 2 < argc && !strcmp(argv[i + 1], "-p2p")) { peers = argv[i + 2]; i += 2; }
        else { printf("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n"); return 6; }
    }
    if (!(library = dlopen("libnvidia-ml.so.1", RTLD_NOW))) {
        puts("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA Display Driver is properly installed and present in your system.");
        return 12;
    }
    if ((code = ((fn0)need("nvmlInit_v2"))())) {
        if (code == 9) puts("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.\n");
        else printf("Failed to initialize NVML: %s\n", ((const char *(*)(int))need("nvmlErrorString"))(code));
        return code;
    }
    ((fn1)need("nvmlDeviceGetCount_v2"))(&count);
    if (!count) { puts("No devices were found"); return 6; }
    if (list) {
        for (unsigned i = 0; i < count; i++) {
            char name[128], uuid[128];
            field(i, handle(i), "name", 1, name, sizeof name);
            field(i, handle(i), "uuid", 1, uuid, sizeof uuid);
            printf("GPU %u: %s (UUID: %s)\n", i, name, uuid);
        }
        result = 0;
    } else if (fields) result = query(count, fields, format, selection);
    else if (apps) result = query_apps(count, apps, format);
    else if (peers) result = topology(count, peers);
    else result = overview(count);
    ((fn0)need("nvmlShutdown"))();
    return result;
}
