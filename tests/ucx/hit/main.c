/*
 * What a hit costs: mapping and unmapping remote memory that is known already, as cuda_ipc does it for each transfer. UCX's own way, for memory of cuMemAlloc, and
 * the lane's, for memory of cuMemCreate, in turn in one run.
 *
 *     hit FOLDER/libuct_cuda.so REGIONS PASSES
 *
 * The process makes an exporter by fork. Its answer is one line: "stock NS lane NS", the medians over the passes, for one thread. Before that it reads each chunk
 * through the pointer that uct_rkey_ptr gives.
 * Needs UCX from 1.22 on: the places of a few fields of its keys are written down here.
 */
#define _GNU_SOURCE

#include <uct/api/uct.h>

#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHUNK (2ul << 20)
#define KEY 256
#define ROUNDS 20000
/* Where in each chunk its number is. */
#define AT_NUMBER 12345

/* UCX does not install the header of this; the parameters begin with a mask of those that are set, here none. */
ucs_status_t uct_md_mkey_pack_v2(uct_md_h md, uct_mem_h memory, void *address, size_t length, const void *params, void *key);

/* Of a packed and an unpacked key: docs/ucx-integration.md. */
#define AT_PID 152
#define AT_BASE 160
#define AT_PID_NAMESPACE 192

/* Of the driver API, written down from its manual. */
typedef unsigned long long address_t;

struct location {
    int type;
    int id;
};

struct properties {
    int type;
    int handle_types;
    struct location location;
    void *windows;
    unsigned char flags[8];
};

struct access {
    struct location location;
    int rights;
};

static int (*cu_init)(unsigned);
static int (*cu_retain)(void **, int);
static int (*cu_set_current)(void *);
static int (*cu_alloc)(address_t *, size_t);
static int (*cu_from_host)(address_t, const void *, size_t);
static int (*cu_to_host)(void *, address_t, size_t);
static int (*cu_create)(address_t *, size_t, const struct properties *, unsigned long long);
static int (*cu_reserve)(address_t *, size_t, size_t, address_t, unsigned long long);
static int (*cu_map)(address_t, size_t, size_t, address_t, unsigned long long);
static int (*cu_set_access)(address_t, size_t, const struct access *, size_t);

/* UCX's own functions and the lane's, found by name in the module. */
static int (*stock_map)(void *, int, void **, int);
static void (*stock_unmap)(int, uint32_t, uintptr_t, const void *, int, int);
static int (*lane_map)(void *, uint64_t, size_t, int, void **, const void **);
static void (*lane_end)(const void *);

static void fail(const char *what, int code)
{
    fprintf(stderr, "%s: %d\n", what, code);
    exit(1);
}

static void must(int code, const char *what)
{
    if (code != 0) {
        fail(what, code);
    }
}

static void *find(void *library, const char *name)
{
    void *found = library == NULL ? NULL : dlsym(library, name);

    if (found == NULL) {
        fail(name, -1);
    }
    return found;
}

static void open_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    void *context;

    *(void **)&cu_init        = find(library, "cuInit");
    *(void **)&cu_retain      = find(library, "cuDevicePrimaryCtxRetain");
    *(void **)&cu_set_current = find(library, "cuCtxSetCurrent");
    *(void **)&cu_alloc       = find(library, "cuMemAlloc_v2");
    *(void **)&cu_from_host   = find(library, "cuMemcpyHtoD_v2");
    *(void **)&cu_to_host     = find(library, "cuMemcpyDtoH_v2");
    *(void **)&cu_create      = find(library, "cuMemCreate");
    *(void **)&cu_reserve     = find(library, "cuMemAddressReserve");
    *(void **)&cu_map         = find(library, "cuMemMap");
    *(void **)&cu_set_access  = find(library, "cuMemSetAccess");
    must(cu_init(0), "cuInit");
    must(cu_retain(&context, 0), "cuDevicePrimaryCtxRetain");
    must(cu_set_current(context), "cuCtxSetCurrent");
}

/* One chunk in a reservation of its own. */
static address_t chunk(void)
{
    const struct properties properties = {.type = 1, .handle_types = 1, .location = {1, 0}};
    const struct access access         = {.location = {1, 0}, .rights = 3};
    address_t address, handle;

    must(cu_reserve(&address, CHUNK, 0, 0, 0), "cuMemAddressReserve");
    must(cu_create(&handle, CHUNK, &properties, 0), "cuMemCreate");
    must(cu_map(address, CHUNK, 0, handle, 0), "cuMemMap");
    must(cu_set_access(address, CHUNK, &access, 1), "cuMemSetAccess");
    return address;
}

static uct_component_h open_component(uct_md_h *md)
{
    uct_component_attr_t attributes = {.field_mask = UCT_COMPONENT_ATTR_FIELD_NAME};
    uct_component_h *components;
    uct_md_config_t *config;
    unsigned count, i;

    must(uct_query_components(&components, &count), "uct_query_components");
    for (i = 0; i < count; ++i) {
        must(uct_component_query(components[i], &attributes), "uct_component_query");
        if (strcmp(attributes.name, "cuda_ipc") == 0) {
            must(uct_md_config_read(components[i], NULL, NULL, &config), "uct_md_config_read");
            must(uct_md_open(components[i], "cuda_ipc", config, md), "uct_md_open");
            return components[i];
        }
    }
    fail("no cuda_ipc", -1);
    return NULL;
}

static void write_key(int fd, uct_md_h md, address_t address)
{
    const uint64_t params[8] = {0};
    unsigned char key[KEY]   = {0};
    uct_mem_h memory;

    must(uct_md_mem_reg(md, (void *)(uintptr_t)address, CHUNK, UCT_MD_MEM_ACCESS_ALL, &memory), "uct_md_mem_reg");
    must(uct_md_mkey_pack_v2(md, memory, (void *)(uintptr_t)address, CHUNK, params, key), "uct_md_mkey_pack_v2");
    if (write(fd, key, KEY) != KEY) {
        fail("write", -1);
    }
}

static void exporter(int fd, int regions)
{
    uct_md_h md;
    int i;

    open_driver();
    open_component(&md);
    for (i = 0; i < regions; ++i) {
        address_t address;

        must(cu_alloc(&address, CHUNK), "cuMemAlloc");
        write_key(fd, md, address);
        address = chunk();
        must(cu_from_host(address + AT_NUMBER, &i, sizeof(i)), "cuMemcpyHtoD");
        write_key(fd, md, address);
    }
    for (;;) {
        pause();
    }
}

static double now_ns(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e9 + time.tv_nsec;
}

/* Of an unpacked key. */
static uint64_t base_of(const char *key)
{
    uint64_t base;

    memcpy(&base, key + AT_BASE, sizeof(base));
    return base;
}

static void stock_hit(char *key)
{
    uint32_t pid_namespace;
    void *mapped;
    int pid;

    memcpy(&pid, key + AT_PID, sizeof(pid));
    memcpy(&pid_namespace, key + AT_PID_NAMESPACE, sizeof(pid_namespace));
    must(stock_map(key, 0, &mapped, 1), "uct_cuda_ipc_map_memhandle");
    stock_unmap(pid, pid_namespace, base_of(key), mapped, 0, 1);
}

static void lane_hit(char *key)
{
    const void *base;
    void *mapped;

    must(lane_map(key, base_of(key), CHUNK, 0, &mapped, &base), "uct_cuda_ipc_lane_map");
    lane_end(base);
}

/* Nanoseconds for a hit. */
static double pass(void (*hit)(char *), char **keys, int regions)
{
    double start = now_ns();
    int i;

    for (i = 0; i < ROUNDS; ++i) {
        hit(keys[i % regions]);
    }
    return (now_ns() - start) / ROUNDS;
}

/* The lane's memory by a pointer, as uct_rkey_ptr gives it: the number must be there, and the same pointer again. */
static void check_pointer(uct_component_h component, uct_rkey_bundle_t *bundle, int number)
{
    void *pointer, *again;
    int found = -1;

    must(uct_rkey_ptr(component, bundle, base_of((char *)bundle->rkey) + AT_NUMBER, &pointer), "uct_rkey_ptr");
    must(uct_rkey_ptr(component, bundle, base_of((char *)bundle->rkey), &again), "uct_rkey_ptr, again");
    must(cu_to_host(&found, (uintptr_t)pointer, sizeof(found)), "cuMemcpyDtoH");
    if (found != number || (char *)pointer - (char *)again != AT_NUMBER) {
        fail("not what the exporter has there", found);
    }
}

static int compare(const void *a, const void *b)
{
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

int main(int argc, char **argv)
{
    int regions = argc == 4 ? atoi(argv[2]) : 0;
    int passes  = argc == 4 ? atoi(argv[3]) : 0;
    char **keys[2];
    double *times[2];
    uct_component_h component;
    uct_md_h md;
    void *module;
    pid_t child;
    int pipes[2], i, kind;

    if (regions < 1 || passes < 1) {
        fprintf(stderr, "usage: hit FOLDER/libuct_cuda.so REGIONS PASSES\n");
        return 64;
    }
    must(pipe(pipes), "pipe");
    child = fork();
    if (child == 0) {
        exporter(pipes[1], regions);
    }
    close(pipes[1]);

    open_driver();
    component = open_component(&md);
    module    = dlopen(argv[1], RTLD_NOW | RTLD_NOLOAD);
    *(void **)&stock_map   = find(module, "uct_cuda_ipc_map_memhandle");
    *(void **)&stock_unmap = find(module, "uct_cuda_ipc_unmap_memhandle");
    *(void **)&lane_map    = find(module, "uct_cuda_ipc_lane_map");
    *(void **)&lane_end    = find(module, "uct_cuda_ipc_lane_end");
    for (kind = 0; kind < 2; ++kind) {
        keys[kind]  = calloc(regions, sizeof(*keys[kind]));
        times[kind] = calloc(passes, sizeof(*times[kind]));
    }
    for (i = 0; i < 2 * regions; ++i) {
        unsigned char key[KEY];
        uct_rkey_bundle_t bundle;
        size_t got = 0;

        while (got < KEY) {
            ssize_t more = read(pipes[0], key + got, KEY - got);

            if (more <= 0) {
                fail("the exporter has ended", (int)got);
            }
            got += more;
        }
        must(uct_rkey_unpack(component, key, &bundle), "uct_rkey_unpack");
        keys[i % 2][i / 2] = (char *)bundle.rkey;
        if (i % 2 == 1) {
            check_pointer(component, &bundle, i / 2);
        }
    }

    /* The first uses are no hits. */
    pass(stock_hit, keys[0], regions);
    pass(lane_hit, keys[1], regions);
    for (i = 0; i < passes; ++i) {
        times[0][i] = pass(stock_hit, keys[0], regions);
        times[1][i] = pass(lane_hit, keys[1], regions);
    }
    for (kind = 0; kind < 2; ++kind) {
        qsort(times[kind], passes, sizeof(double), compare);
    }
    printf("stock %.0f lane %.0f\n", times[0][passes / 2], times[1][passes / 2]);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    return 0;
}
