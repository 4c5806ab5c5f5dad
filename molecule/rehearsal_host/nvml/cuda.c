/* SPDX-License-Identifier: GPL-3.0-or-later
 * A stand-in for libcuda.so.1 on a host without GPUs, as far as a copy between two GPUs needs it. Their memory is that of the host.
 * Which GPUs there are, and whether the driver fits, the stand-in NVML library says; rules of "p2p" in the description of the GPUs
 * (README.md beside this file) spoil copies. It is no part of the product.
 *
 * Build: see build.sh. */
#include <dlfcn.h>
#include <stdint.h>
#include <unistd.h>

#include "json.h"

#define API __attribute__((visibility("default")))
enum { OK = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, ALREADY_ENABLED = 704, UNSUPPORTED = 803 };
enum { MAX_GPUS = 32 };

static struct {
    void *library;
    int (*by_bus_id)(const char *, void **);
    int (*index)(void *, unsigned *);
    int (*p2p)(void *, void *, unsigned, unsigned *);
    json *tree;
    void *handles[MAX_GPUS];
    char enabled[MAX_GPUS][MAX_GPUS];
    intptr_t current;
} state;

API int cuInit(unsigned flags) {
    int (*start)(void);
    const char *path = getenv("REHEARSAL_GPUS");
    (void)flags;
    if (state.library) return OK;
    if (!(state.library = dlopen("libnvidia-ml.so.1", RTLD_NOW))) return NO_DEVICE;
    *(void **)&start = dlsym(state.library, "nvmlInit_v2");
    *(void **)&state.by_bus_id = dlsym(state.library, "nvmlDeviceGetHandleByPciBusId_v2");
    *(void **)&state.index = dlsym(state.library, "nvmlDeviceGetIndex");
    *(void **)&state.p2p = dlsym(state.library, "nvmlDeviceGetP2PStatus");
    state.tree = json_parse_file(path && *path ? path : "/etc/rehearsal/gpus.json");
    switch (start()) {
        case 0: return OK;
        case 18: return UNSUPPORTED; /* the loaded module has another version */
        default: return NO_DEVICE;
    }
}

API int cuGetErrorName(int code, const char **out) {
    *out = code == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE"
        : code == INVALID_DEVICE ? "CUDA_ERROR_INVALID_DEVICE"
        : code == UNSUPPORTED ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
        : "CUDA_ERROR_UNKNOWN";
    return OK;
}

API int cuDeviceGetByPCIBusId(int *out, const char *bus_id) {
    void *handle;
    unsigned index;
    if (!state.tree) return NOT_INITIALIZED;
    if (state.by_bus_id(bus_id, &handle) || state.index(handle, &index) || index >= MAX_GPUS) return INVALID_DEVICE;
    state.handles[index] = handle;
    *out = (int)index;
    return OK;
}

/* A context is the number of its GPU, counted from one. */
API int cuDevicePrimaryCtxRetain(intptr_t *out, int device) { *out = device + 1; return OK; }
API int cuCtxSetCurrent(intptr_t context) { state.current = context; return OK; }
API int cuCtxSynchronize(void) { return OK; }

/* What the last rule that fits a pair says of its copies, or NULL. */
static const char *rule_of(intptr_t a, intptr_t b) {
    const json *rules = json_get(state.tree, "p2p"), *rule = rules ? rules->child : NULL;
    const char *found = NULL;
    for (; rule; rule = rule->next) {
        const json *list = json_get(rule, "gpus"), *item = list ? list->child : NULL;
        int seen_a = !list, seen_b = !list;
        for (; item; item = item->next) {
            seen_a |= (intptr_t)item->number == a;
            seen_b |= (intptr_t)item->number == b;
        }
        if (seen_a && seen_b && json_text(rule, "copy", NULL)) found = json_text(rule, "copy", NULL);
    }
    return found;
}

API int cuDeviceCanAccessPeer(int *out, int one, int other) {
    unsigned status = 0;
    if (one == other) { *out = 0; return OK; }
    if (state.p2p(state.handles[one], state.handles[other], 0, &status)) return INVALID_DEVICE;
    *out = status == 0;
    return OK;
}

API int cuCtxEnablePeerAccess(intptr_t peer, unsigned flags) {
    char *cell = &state.enabled[state.current - 1][peer - 1];
    (void)flags;
    if (*cell) return ALREADY_ENABLED;
    *cell = 1;
    return OK;
}

API int cuMemAlloc_v2(uint64_t *out, size_t size) { *out = (uint64_t)(uintptr_t)malloc(size); return *out ? OK : 2; }
API int cuMemFree_v2(uint64_t memory) { free((void *)(uintptr_t)memory); return OK; }
API int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) { memcpy((void *)(uintptr_t)to, from, size); return OK; }
API int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) { memcpy(to, (void *)(uintptr_t)from, size); return OK; }
API int cuMemsetD8_v2(uint64_t memory, unsigned char value, size_t size) { memset((void *)(uintptr_t)memory, value, size); return OK; }

API int cuMemcpyPeer(uint64_t to, intptr_t there, uint64_t from, intptr_t here, size_t size) {
    const char *rule = rule_of(here - 1, there - 1);
    if (rule && !strcmp(rule, "hang")) for (;;) pause();
    if (!rule || strcmp(rule, "wrong_data")) memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, size);
    return OK;
}
