/*
 * Driver memory: the commands that make, fill, check and free it. The driver is opened at run time and its functions are looked up, as the CUDA runtime does
 * it, so that no call of ours goes through the loader's tables.
 */
#define _GNU_SOURCE

#include "player.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

/* Of the driver API, written down from its manual: what this file needs, by names of ours. */
typedef unsigned long long address_t;
typedef unsigned long long handle_t;

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

struct pool_properties {
    int type;
    int handle_types;
    struct location location;
    void *windows;
    size_t most;
    unsigned char rest[56];
};

#define TYPE_PINNED 1
#define LOCATION_DEVICE 1
#define READ_WRITE 3
#define ATTRIBUTE_BUFFER_ID 7

#define FUNCTIONS(of)                                                              \
    of(cuInit, (unsigned int))                                                     \
    of(cuDevicePrimaryCtxRetain, (void **, int))                                   \
    of(cuCtxSetCurrent, (void *))                                                  \
    of(cuCtxSynchronize, (void))                                                   \
    of(cuMemAlloc_v2, (address_t *, size_t))                                       \
    of(cuMemFree_v2, (address_t))                                                  \
    of(cuMemcpyHtoD_v2, (address_t, const void *, size_t))                         \
    of(cuMemcpyDtoH_v2, (void *, address_t, size_t))                               \
    of(cuMemcpyDtoDAsync_v2, (address_t, address_t, size_t, void *))               \
    of(cuMemGetInfo_v2, (size_t *, size_t *))                                      \
    of(cuMemCreate, (handle_t *, size_t, const struct properties *, unsigned long long)) \
    of(cuMemRelease, (handle_t))                                                   \
    of(cuMemAddressReserve, (address_t *, size_t, size_t, address_t, unsigned long long)) \
    of(cuMemAddressFree, (address_t, size_t))                                      \
    of(cuMemMap, (address_t, size_t, size_t, handle_t, unsigned long long))        \
    of(cuMemUnmap, (address_t, size_t))                                            \
    of(cuMemSetAccess, (address_t, size_t, const struct access *, size_t))         \
    of(cuMemPoolCreate, (void **, const struct pool_properties *))                 \
    of(cuMemPoolDestroy, (void *))                                                 \
    of(cuMemAllocFromPoolAsync, (address_t *, size_t, void *, void *))             \
    of(cuMemFreeAsync, (address_t, void *))

#define DECLARE(name, parameters) static int (*name) parameters;
FUNCTIONS(DECLARE)

static void *library;
static int current_device;

/* Makes the primary context of a device current. */
static int use_device(int device)
{
    void *context;
    int code = cuDevicePrimaryCtxRetain(&context, device);

    current_device = device;
    return code != 0 ? code : cuCtxSetCurrent(context);
}

int open_driver(int device)
{
    int code;

    library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        refuse(-1, dlerror());
        return 0;
    }
#define LOOK_UP(name, parameters) *(void **)&name = dlsym(library, #name);
    FUNCTIONS(LOOK_UP)
    if ((code = cuInit(0)) != 0 || (code = use_device(device)) != 0) {
        refuse(code, "no context");
        return 0;
    }
    return 1;
}

/* Refuses the command and returns 0 if a driver call has failed. */
static int worked(int code, const char *what)
{
    if (code != 0) {
        refuse(code, what);
    }
    return code == 0;
}

/* use DEVICE: what is allocated from here on is there. */
static void do_use(char **argument)
{
    worked(use_device(signed_number(argument[0])), "use");
}

/* alloc BYTES: memory of cuMemAlloc. */
static void do_alloc(char **argument)
{
    address_t address;

    if (worked(cuMemAlloc_v2(&address, number(argument[0])), "cuMemAlloc")) {
        answer("%#llx", address);
    }
}

/* free ADDRESS: what alloc or pool has made. */
static void do_free(char **argument)
{
    worked(cuMemFree_v2(number(argument[0])), "cuMemFree");
}

/* pool BYTES TYPES: a pool of these handle types and an allocation from it. */
static void do_pool(char **argument)
{
    struct pool_properties properties = {.type = TYPE_PINNED, .handle_types = signed_number(argument[1])};
    address_t address;
    void *pool;

    properties.location = (struct location){LOCATION_DEVICE, current_device};
    if (worked(cuMemPoolCreate(&pool, &properties), "cuMemPoolCreate") &&
        worked(cuMemAllocFromPoolAsync(&address, number(argument[0]), pool, NULL), "cuMemAllocFromPoolAsync") &&
        worked(cuCtxSynchronize(), "cuCtxSynchronize")) {
        answer("%#llx %p", address, pool);
    }
}

/* pool_more BYTES POOL: another allocation from a pool. */
static void do_pool_more(char **argument)
{
    address_t address;

    if (worked(cuMemAllocFromPoolAsync(&address, number(argument[0]), (void *)(uintptr_t)number(argument[1]), NULL), "cuMemAllocFromPoolAsync") &&
        worked(cuCtxSynchronize(), "cuCtxSynchronize")) {
        answer("%#llx", address);
    }
}

/* free_async ADDRESS: what pool or pool_more has made, as a stream-ordered allocator frees it. */
static void do_free_async(char **argument)
{
    if (worked(cuMemFreeAsync(number(argument[0]), NULL), "cuMemFreeAsync")) {
        worked(cuCtxSynchronize(), "cuCtxSynchronize");
    }
}

/* reserve BYTES ADDRESS: addresses, there if the address is not 0. */
static void do_reserve(char **argument)
{
    address_t address, wished = number(argument[1]);

    if (worked(cuMemAddressReserve(&address, number(argument[0]), 0, wished, 0), "cuMemAddressReserve")) {
        if (wished != 0 && wished != address) {
            cuMemAddressFree(address, number(argument[0]));
            refuse(-1, "other addresses");
            return;
        }
        answer("%#llx", address);
    }
}

/* unreserve ADDRESS BYTES */
static void do_unreserve(char **argument)
{
    worked(cuMemAddressFree(number(argument[0]), number(argument[1])), "cuMemAddressFree");
}

/* chunks ADDRESS BYTES COUNT TYPES: so many chunks of so many bytes, one behind the other, of these handle types, accessible for this device. */
static void do_chunks(char **argument)
{
    address_t address = number(argument[0]);
    size_t bytes = number(argument[1]), count = number(argument[2]), at;
    struct properties properties = {.type = TYPE_PINNED, .handle_types = signed_number(argument[3])};
    struct access access = {{LOCATION_DEVICE, current_device}, READ_WRITE};

    properties.location = access.location;
    for (at = 0; at < count; at++) {
        handle_t handle;
        int code;

        if (!worked(cuMemCreate(&handle, bytes, &properties, 0), "cuMemCreate")) {
            return;
        }
        code = cuMemMap(address + at * bytes, bytes, 0, handle, 0);
        cuMemRelease(handle);
        if (!worked(code, "cuMemMap")) {
            return;
        }
    }
    worked(cuMemSetAccess(address, bytes * count, &access, 1), "cuMemSetAccess");
}

/* unmap ADDRESS BYTES: whole chunks, whose memory goes with it. */
static void do_unmap(char **argument)
{
    worked(cuMemUnmap(number(argument[0]), number(argument[1])), "cuMemUnmap");
}

/* create BYTES TYPES: physical memory without an address; release HANDLE gives it back. */
static void do_create(char **argument)
{
    struct properties properties = {.type = TYPE_PINNED, .handle_types = signed_number(argument[1])};
    handle_t handle;

    properties.location = (struct location){LOCATION_DEVICE, current_device};
    if (worked(cuMemCreate(&handle, number(argument[0]), &properties, 0), "cuMemCreate")) {
        answer("%#llx", handle);
    }
}

static void do_release(char **argument)
{
    worked(cuMemRelease(number(argument[0])), "cuMemRelease");
}

/* info: free bytes of the device. */
static void do_info(char **argument)
{
    size_t unused, total;

    (void)argument;
    if (worked(cuMemGetInfo_v2(&unused, &total), "cuMemGetInfo")) {
        answer("%zu %zu", unused, total);
    }
}

/* Eight bytes of a test pattern, which differ for every seed and place. */
static uint64_t pattern(uint64_t seed, uint64_t word)
{
    uint64_t mixed = (seed + 1) * 0x9e3779b97f4a7c15u ^ (word + 1) * 0xc2b2ae3d27d4eb4fu;

    mixed ^= mixed >> 29;
    return mixed * 0xbf58476d1ce4e5b9u;
}

#define STAGE (1u << 20)

static void write_pattern(unsigned char *bytes, size_t length, uint64_t seed, uint64_t first)
{
    size_t at;

    for (at = 0; at < length && (first + at) % 8 != 0; at++) {
        bytes[at] = (unsigned char)(pattern(seed, (first + at) / 8) >> 8 * ((first + at) % 8));
    }
    for (; at + 8 <= length; at += 8) {
        uint64_t word = pattern(seed, (first + at) / 8);
        memcpy(bytes + at, &word, 8);
    }
    for (; at < length; at++) {
        bytes[at] = (unsigned char)(pattern(seed, (first + at) / 8) >> 8 * ((first + at) % 8));
    }
}

/* fill ADDRESS BYTES SEED FIRST: writes the pattern of this seed, from its byte FIRST on. */
static void do_fill(char **argument)
{
    address_t address = number(argument[0]);
    uint64_t length = number(argument[1]), seed = number(argument[2]), first = number(argument[3]), at;
    unsigned char *stage = malloc(STAGE);

    for (at = 0; at < length; at += STAGE) {
        size_t part = length - at < STAGE ? length - at : STAGE;
        write_pattern(stage, part, seed, first + at);
        if (!worked(cuMemcpyHtoD_v2(address + at, stage, part), "cuMemcpyHtoD")) {
            break;
        }
    }
    /* Other processes do not wait for what is only staged. */
    worked(cuCtxSynchronize(), "cuCtxSynchronize");
    free(stage);
}

/* check ADDRESS BYTES SEED FIRST: how many bytes are not the pattern's, and where the first of them is. */
static void do_check(char **argument)
{
    address_t address = number(argument[0]);
    uint64_t length = number(argument[1]), seed = number(argument[2]), first = number(argument[3]), at, wrong = 0, where = 0;
    unsigned char *stage = malloc(STAGE), *wanted = malloc(STAGE);

    for (at = 0; at < length; at += STAGE) {
        size_t part = length - at < STAGE ? length - at : STAGE, byte;
        if (!worked(cuMemcpyDtoH_v2(stage, address + at, part), "cuMemcpyDtoH")) {
            goto out;
        }
        write_pattern(wanted, part, seed, first + at);
        if (memcmp(stage, wanted, part) == 0) {
            continue;
        }
        for (byte = 0; byte < part; byte++) {
            if (stage[byte] != wanted[byte] && wrong++ == 0) {
                where = at + byte;
            }
        }
    }
    answer("%llu %llu", (unsigned long long)wrong, (unsigned long long)where);
out:
    free(stage);
    free(wanted);
}

/* Submits a copy in parts: the first of so many bytes, 0 for one of all, each of the others longer by this many percent. */
static int copy_in_parts(address_t to, address_t from, uint64_t bytes, uint64_t part, uint64_t percent)
{
    uint64_t done, now;
    int code;

    for (done = 0; done < bytes; done += now) {
        now = part == 0 || (bytes - done) / 2 < part ? bytes - done : part;
        code = cuMemcpyDtoDAsync_v2(to + done, from + done, now, NULL);
        if (code != 0) {
            return code;
        }
        part += part * percent / 100;
    }
    return 0;
}

/* copies FROM FROM TO BYTES COUNT PART PERCENT: so many pairs of copies within the process, in strict turns of the two sources; the microseconds of each. */
static void do_copies(char **argument)
{
    uint64_t at, copies = 2 * number(argument[4]);
    size_t used = 0, room = 32 * copies + 1;
    char *text = calloc(1, room);

    for (at = 0; at < copies; at++) {
        double start = now_ms();

        /* The second source in parts, the first at once: that is what it is compared with. */
        if (!worked(copy_in_parts(number(argument[2]), number(argument[at % 2]), number(argument[3]), at % 2 ? number(argument[5]) : 0, number(argument[6])),
                    "cuMemcpyDtoDAsync") ||
            !worked(cuCtxSynchronize(), "cuCtxSynchronize")) {
            goto out;
        }
        used += (size_t)snprintf(text + used, room - used, "%s%.3f", at == 0 ? "" : " ", (now_ms() - start) * 1e3);
    }
    answer("%s", text);
out:
    free(text);
}

/* Calls a function that only the fake driver has, and answers with the numbers it gives. */
static void answer_numbers(const char *name, int device, size_t count)
{
    unsigned long long numbers[16] = {0};
    void *function = dlsym(library, name);
    char text[512] = "";
    size_t at;
    int code = -1;

    if (function != NULL && device < 0) {
        code = ((int (*)(void *, size_t))function)(numbers, count * sizeof(*numbers));
    } else if (function != NULL) {
        code = ((int (*)(unsigned int, void *, size_t))function)((unsigned int)device, numbers, count * sizeof(*numbers));
    }
    if (!worked(code, name)) {
        return;
    }
    for (at = 0; at < count; at++) {
        sprintf(text + strlen(text), "%s%llu", at == 0 ? "" : " ", numbers[at]);
    }
    answer("%s", text);
}

/* counters: what this process has and has done, in the order of the fake driver's structure. */
static void do_counters(char **argument)
{
    (void)argument;
    answer_numbers("fake_cuda_counters", -1, 13);
}

/* device GPU: what all processes have of a device, likewise. */
static void do_device(char **argument)
{
    answer_numbers("fake_cuda_device", signed_number(argument[0]), 8);
}

/* calls NAME: how often this process has called a driver function. */
static void do_calls(char **argument)
{
    unsigned long long (*calls)(const char *) = (unsigned long long (*)(const char *))dlsym(library, "fake_cuda_calls");

    answer("%llu", calls == NULL ? 0 : calls(argument[0]));
}

/* async MICROSECONDS: when the driver's asynchronous work completes; -1 holds it, 0 does it at once. */
static void do_async(char **argument)
{
    int (*set)(int64_t) = (int (*)(int64_t))dlsym(library, "fake_cuda_set_async");

    worked(set == NULL ? -1 : set(strtoll(argument[0], NULL, 0)), "fake_cuda_set_async");
}

/* let_go: all that is queued now completes. */
static void do_let_go(char **argument)
{
    int (*let_go)(void) = (int (*)(void))dlsym(library, "fake_cuda_release_queue");

    (void)argument;
    worked(let_go == NULL ? -1 : let_go(), "fake_cuda_release_queue");
}

/* fork: a child that has all fds and does nothing until it is killed, as an idle worker of a data loader. */
static void do_fork(char **argument)
{
    pid_t child = fork();

    (void)argument;
    if (child == 0) {
        int nothing = open("/dev/null", O_RDWR);
        dup2(nothing, STDIN_FILENO);
        dup2(nothing, STDOUT_FILENO);
        /* A test that forgets it is not to leave it behind for long. */
        alarm(120);
        for (;;) {
            pause();
        }
    }
    answer("%d", (int)child);
}

/* fork_exit: a child that ends at once as a program does, with all that happens then; its status. */
static void do_fork_exit(char **argument)
{
    pid_t child = fork();
    int status = -1;

    (void)argument;
    if (child == 0) {
        exit(0);
    }
    waitpid(child, &status, 0);
    answer("%d", status);
}

/* exit: the end as a program has it, unlike the end of the input. */
static void do_exit(char **argument)
{
    (void)argument;
    answer("%s", "");
    exit(0);
}

/* deepbind FILE: loads a module so that it looks for functions in what it depends on before anywhere else. */
static void do_deepbind(char **argument)
{
    if (dlopen(argument[0], RTLD_LAZY | RTLD_LOCAL | RTLD_DEEPBIND) == NULL) {
        refuse(-1, dlerror());
    }
}

const struct command MEMORY_COMMANDS[] = {
    {"use", 1, do_use},
    {"alloc", 1, do_alloc},
    {"free", 1, do_free},
    {"pool", 2, do_pool},
    {"pool_more", 2, do_pool_more},
    {"free_async", 1, do_free_async},
    {"reserve", 2, do_reserve},
    {"unreserve", 2, do_unreserve},
    {"chunks", 4, do_chunks},
    {"unmap", 2, do_unmap},
    {"create", 2, do_create},
    {"release", 1, do_release},
    {"info", 0, do_info},
    {"fill", 4, do_fill},
    {"check", 4, do_check},
    {"copies", 7, do_copies},
    {"counters", 0, do_counters},
    {"device", 1, do_device},
    {"calls", 1, do_calls},
    {"async", 1, do_async},
    {"let_go", 0, do_let_go},
    {"fork", 0, do_fork},
    {"fork_exit", 0, do_fork_exit},
    {"exit", 0, do_exit},
    {"deepbind", 1, do_deepbind},
    {NULL, 0, NULL},
};
