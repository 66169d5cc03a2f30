/*
 * Memory of cuMemAlloc and of a POSIX_FD pool through the same calls as any other.
 *
 *     others export SOCKET
 *     others import SOCKET
 */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif

#include "common.h"
#include "driver.h"
#include "require.h"

#define PATIENCE ((uint64_t)20 * 1000 * 1000 * 1000)
#define LENGTH ((size_t)3 << 20)

extern int cuMemAlloc_v2(CUdeviceptr *address, size_t size);
extern int cuMemFree_v2(CUdeviceptr address);
extern int cuMemPoolCreate(void **pool, const void *properties);
extern int cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t size, void *pool, void *stream);

static CUdeviceptr from_pool(void)
{
    struct {
        int type, handle_types;
        CUmemLocation location;
        void *windows;
        size_t most;
        unsigned char rest[56];
    } properties;
    CUdeviceptr address;
    void *pool;

    memset(&properties, 0, sizeof(properties));
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.handle_types = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUDA(cuMemPoolCreate(&pool, &properties));
    CUDA(cuMemAllocFromPoolAsync(&address, LENGTH, pool, NULL));
    CUDA(cuCtxSynchronize());
    return address;
}

static void fill(CUdeviceptr address, size_t seed)
{
    unsigned char *bytes = (unsigned char *)malloc(LENGTH);
    size_t at;

    REQUIRE(bytes != NULL);
    for (at = 0; at < LENGTH; at++) {
        bytes[at] = pattern(seed + at);
    }
    CUDA(cuMemcpyHtoD_v2(address, bytes, LENGTH));
    free(bytes);
}

static int export_both(const char *path)
{
    struct sockaddr_un address = socket_address(path);
    int listener = SYSTEM(socket(AF_UNIX, SOCK_STREAM, 0)), importer;
    cuda_ipc_context_t context;
    CUdeviceptr memory[2];
    cuda_ipc_export_t shared[2];
    unsigned char rkey[CUDA_IPC_RKEY_LEN];
    char word;
    int at;

    open_driver();
    CUDA(cuMemAlloc_v2(&memory[0], LENGTH));
    memory[1] = from_pool();
    IPC(cuda_ipc_context_create(NULL, &context));
    SYSTEM(bind(listener, (struct sockaddr *)&address, sizeof(address)));
    SYSTEM(listen(listener, 1));
    importer = SYSTEM(accept(listener, NULL, NULL));
    for (at = 0; at < 2; at++) {
        static const uint32_t types[] = {CUDA_IPC_TYPE_LEGACY, CUDA_IPC_TYPE_POSIX};
        cuda_ipc_export_info_t info;
        cuda_ipc_probe_t probe;
        cuda_ipc_window_t window;
        cuda_ipc_lease_t lease;
        uint64_t local;
        size_t length;

        fill(memory[at], (size_t)at * 1000);
        probe.size = sizeof(probe);
        IPC(cuda_ipc_probe(context, memory[at], &probe));
        REQUIRE(probe.shareable == 1 && probe.handle_type == types[at] && probe.reason == CUDA_IPC_OK);
        REQUIRE(((probe.memory & CUDA_IPC_MEMORY_POOL) != 0) == (at == 1) && ((probe.memory & CUDA_IPC_MEMORY_LEGACY) != 0) == (at == 0));
        IPC(cuda_ipc_export(context, memory[at], LENGTH, &shared[at]));
        info.size = sizeof(info);
        IPC(cuda_ipc_export_info(shared[at], &info));
        REQUIRE(info.handle_type == types[at] && info.reason == CUDA_IPC_OK && info.base <= memory[at] && info.length >= LENGTH);
        IPC(cuda_ipc_export_rkey(shared[at], rkey, sizeof(rkey), &length));
        /* Here it is the memory itself. */
        IPC(cuda_ipc_import(context, rkey, length, NULL, PATIENCE, &window));
        IPC(cuda_ipc_lease(window, memory[at] + 5, 10, 0, &lease, &local));
        REQUIRE(local == memory[at] + 5);
        IPC(cuda_ipc_lease_end(lease));
        IPC(cuda_ipc_window_release(window));
        REQUIRE(SYSTEM(write(importer, &memory[at], sizeof(memory[at]))) == (int)sizeof(memory[at]));
        REQUIRE(SYSTEM(write(importer, rkey, length)) == (int)length);
    }
    while (SYSTEM(read(importer, &word, 1)) > 0) {
    }
    IPC(cuda_ipc_context_destroy(context));
    CUDA(cuMemFree_v2(memory[0]));
    CUDA(cuMemFree_v2(memory[1]));
    unlink(path);
    printf("exported\n");
    return 0;
}

static void receive(int from, void *to, size_t length)
{
    size_t got = 0;

    while (got < length) {
        int part = SYSTEM(read(from, (char *)to + got, length - got));

        REQUIRE(part > 0);
        got += (size_t)part;
    }
}

static int import_both(const char *path)
{
    static unsigned char bytes[LENGTH];
    struct sockaddr_un address = socket_address(path);
    int exporter = SYSTEM(socket(AF_UNIX, SOCK_STREAM, 0)), tries, which;
    cuda_ipc_context_t context;
    cuda_ipc_stats_t stats;

    open_driver();
    IPC(cuda_ipc_context_create(NULL, &context));
    for (tries = 0; connect(exporter, (struct sockaddr *)&address, sizeof(address)) != 0; tries++) {
        struct timeval pause = {0, 10000};

        REQUIRE(tries < 1000);
        select(0, NULL, NULL, NULL, &pause);
    }
    for (which = 0; which < 2; which++) {
        unsigned char rkey[CUDA_IPC_RKEY_LEN];
        cuda_ipc_window_info_t info;
        cuda_ipc_window_t window;
        cuda_ipc_lease_t lease;
        CUdeviceptr memory;
        uint64_t local;
        size_t at;

        receive(exporter, &memory, sizeof(memory));
        receive(exporter, rkey, sizeof(rkey));
        IPC(cuda_ipc_import(context, rkey, sizeof(rkey), NULL, PATIENCE, &window));
        info.size = sizeof(info);
        IPC(cuda_ipc_window_info(window, &info));
        REQUIRE(info.own_process == 0 && info.base <= memory && info.length >= LENGTH && (info.pid != 0) == (which == 1));
        IPC(cuda_ipc_lease(window, memory, LENGTH, PATIENCE, &lease, &local));
        CUDA(cuMemcpyDtoH_v2(bytes, local, LENGTH));
        for (at = 0; at < LENGTH; at++) {
            REQUIRE(bytes[at] == pattern((size_t)which * 1000 + at));
        }
        REQUIRE(cuda_ipc_lease(window, info.base + info.length, 1, PATIENCE, &lease, &local) == CUDA_IPC_ERR_RANGE);
        IPC(cuda_ipc_lease_end(lease));
        REQUIRE(cuda_ipc_lease_end(lease) == CUDA_IPC_ERR_STALE_HANDLE);
        stats.size = sizeof(stats);
        IPC(cuda_ipc_stats(context, &stats));
        REQUIRE(stats.legacy_handles == (which == 0) && stats.windows == 1);
        /* A lease keeps a legacy handle open, too. */
        IPC(cuda_ipc_lease(window, memory, 4096, PATIENCE, &lease, &local));
        IPC(cuda_ipc_window_release(window));
        CUDA(cuMemcpyDtoH_v2(bytes, local, 4096));
        REQUIRE(bytes[4095] == pattern((size_t)which * 1000 + 4095));
        IPC(cuda_ipc_lease_end(lease));
        IPC(cuda_ipc_stats(context, &stats));
        REQUIRE(stats.legacy_handles == 0 && stats.windows == 0 && stats.closing_windows == 0);
    }
    IPC(cuda_ipc_context_destroy(context));
    close(exporter);
    printf("verified both\n");
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "export") == 0) {
        return export_both(argv[2]);
    }
    if (argc == 3 && strcmp(argv[1], "import") == 0) {
        return import_both(argv[2]);
    }
    fprintf(stderr, "usage: others export|import SOCKET\n");
    return 64;
}
