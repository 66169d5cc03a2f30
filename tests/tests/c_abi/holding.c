/*
 * A chunk is replaced while the importer has a lease of the old one, taken with another handle of the same memory.
 *
 *     holding export SOCKET
 *     holding import SOCKET
 */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif

#include "common.h"
#include "driver.h"
#include "require.h"

#include <time.h>

#define PATIENCE ((uint64_t)20 * 1000 * 1000 * 1000)
#define CHUNK ((size_t)2 << 20)

/* Maps a new chunk and writes one byte all over it. */
static void map_chunk(CUdeviceptr base, int byte)
{
    static unsigned char bytes[CHUNK];
    CUmemAllocationProp properties;
    CUmemGenericAllocationHandle handle;
    CUmemAccessDesc access;

    memset(&properties, 0, sizeof(properties));
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    memset(&access, 0, sizeof(access));
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CUDA(cuMemCreate(&handle, CHUNK, &properties, 0));
    CUDA(cuMemMap(base, CHUNK, 0, handle, 0));
    CUDA(cuMemRelease(handle));
    CUDA(cuMemSetAccess(base, CHUNK, &access, 1));
    memset(bytes, byte, sizeof(bytes));
    CUDA(cuMemcpyHtoD_v2(base, bytes, sizeof(bytes)));
}

static int export_twice(const char *path)
{
    struct sockaddr_un address = socket_address(path);
    int listener = SYSTEM(socket(AF_UNIX, SOCK_STREAM, 0)), importer, round;
    unsigned char rkey[CUDA_IPC_RKEY_LEN];
    cuda_ipc_context_t context;
    CUdeviceptr base;
    char word;

    open_driver();
    IPC(cuda_ipc_context_create(NULL, &context));
    CUDA(cuMemAddressReserve(&base, CHUNK, 0, 0, 0));
    SYSTEM(bind(listener, (struct sockaddr *)&address, sizeof(address)));
    SYSTEM(listen(listener, 1));
    importer = SYSTEM(accept(listener, NULL, NULL));
    for (round = 1; round <= 2; round++) {
        cuda_ipc_export_t shared;
        size_t length;

        map_chunk(base, round);
        IPC(cuda_ipc_export(context, base, CHUNK, &shared));
        IPC(cuda_ipc_export_rkey(shared, rkey, sizeof(rkey), &length));
        /* Of the reservation, so it is the same one the second time. */
        REQUIRE(SYSTEM(write(importer, rkey, length)) == CUDA_IPC_RKEY_LEN);
        REQUIRE(SYSTEM(read(importer, &word, 1)) == (round == 1));
        IPC(cuda_ipc_export_release(shared));
        CUDA(cuMemUnmap(base, CHUNK));
    }
    IPC(cuda_ipc_context_destroy(context));
    unlink(path);
    printf("exported\n");
    return 0;
}

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static int import_under_a_lease(const char *path)
{
    unsigned char rkey[CUDA_IPC_RKEY_LEN], same[CUDA_IPC_RKEY_LEN], byte;
    int exporter = receive_rkey(path, rkey);
    cuda_ipc_context_t context;
    cuda_ipc_window_info_t info;
    cuda_ipc_window_t one, other;
    cuda_ipc_lease_t old, new_lease;
    uint64_t local;
    size_t got = 0;
    double start;

    open_driver();
    IPC(cuda_ipc_context_create(NULL, &context));
    IPC(cuda_ipc_import(context, rkey, sizeof(rkey), NULL, PATIENCE, &one));
    IPC(cuda_ipc_import(context, rkey, sizeof(rkey), NULL, PATIENCE, &other));
    REQUIRE(one.id != other.id);
    info.size = sizeof(info);
    IPC(cuda_ipc_window_info(one, &info));
    IPC(cuda_ipc_lease(one, info.base, CHUNK, PATIENCE, &old, &local));
    CUDA(cuMemcpyDtoH_v2(&byte, local, 1));
    REQUIRE(byte == 1);

    SYSTEM(write(exporter, "", 1));
    while (got < sizeof(same)) {
        int part = SYSTEM(read(exporter, same + got, sizeof(same) - got));

        REQUIRE(part > 0);
        got += (size_t)part;
    }
    REQUIRE(memcmp(same, rkey, sizeof(rkey)) == 0);

    /* The old lease is in the way of the new chunk, and the caller has it. */
    start = now();
    REQUIRE(cuda_ipc_lease_holding(other, info.base, CHUNK, PATIENCE, &old, 1, &new_lease, &local) == CUDA_IPC_WOULD_BLOCK);
    REQUIRE(now() - start < (double)PATIENCE / 1e9 / 2);
    IPC(cuda_ipc_lease_end(old));
    /* Of an ended lease's handle nothing is waited for. */
    IPC(cuda_ipc_lease_holding(other, info.base, CHUNK, PATIENCE, &old, 1, &new_lease, &local));
    CUDA(cuMemcpyDtoH_v2(&byte, local + CHUNK - 1, 1));
    REQUIRE(byte == 2);
    IPC(cuda_ipc_lease_end(new_lease));
    IPC(cuda_ipc_context_destroy(context));
    close(exporter);
    printf("replaced under a lease\n");
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "export") == 0) {
        return export_twice(argv[2]);
    }
    if (argc == 3 && strcmp(argv[1], "import") == 0) {
        return import_under_a_lease(argv[2]);
    }
    fprintf(stderr, "usage: holding export|import SOCKET\n");
    return 64;
}
