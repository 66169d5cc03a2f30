/*
 * The smallest exporter: shares memory of several physical chunks with whoever connects to a socket, and ends when that one has.
 *
 *     exporter SOCKET
 */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif

#include "common.h"
#include "driver.h"

#define CHUNKS 5
#define CHUNK ((size_t)2 << 20)
#define LENGTH (CHUNKS * CHUNK)

/* Makes one range of addresses with chunks in it, as an allocator of expandable segments does. */
static CUdeviceptr allocate(void)
{
    CUmemAllocationProp properties;
    CUmemAccessDesc access;
    CUdeviceptr base;
    int chunk;

    memset(&properties, 0, sizeof(properties));
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    memset(&access, 0, sizeof(access));
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;

    CUDA(cuMemAddressReserve(&base, LENGTH, 0, 0, 0));
    for (chunk = 0; chunk < CHUNKS; chunk++) {
        CUmemGenericAllocationHandle handle;

        CUDA(cuMemCreate(&handle, CHUNK, &properties, 0));
        CUDA(cuMemMap(base + (CUdeviceptr)chunk * CHUNK, CHUNK, 0, handle, 0));
        CUDA(cuMemRelease(handle));
    }
    CUDA(cuMemSetAccess(base, LENGTH, &access, 1));
    return base;
}

static void fill(CUdeviceptr base)
{
    unsigned char *bytes = (unsigned char *)malloc(LENGTH);
    size_t offset;

    if (bytes == NULL) {
        exit(1);
    }
    for (offset = 0; offset < LENGTH; offset++) {
        bytes[offset] = pattern(offset);
    }
    CUDA(cuMemcpyHtoD_v2(base, bytes, LENGTH));
    /* That call may return before the bytes are there. Within this process everything waits for them; another process does not. */
    CUDA(cuCtxSynchronize());
    free(bytes);
}

int main(int argc, char **argv)
{
    unsigned char rkey[CUDA_IPC_RKEY_LEN];
    char name[] = "exporter";
    struct sockaddr_un address;
    cuda_ipc_config_t config;
    cuda_ipc_context_t context;
    cuda_ipc_export_t shared;
    cuda_ipc_export_info_t info;
    CUdeviceptr base;
    size_t length;
    char word;
    int listener, importer;

    if (argc != 2) {
        fprintf(stderr, "usage: exporter SOCKET\n");
        return 64;
    }
    open_driver();
    base = allocate();
    fill(base);

    IPC(cuda_ipc_config_init(&config, sizeof(config)));
    config.log = print_log;
    config.log_user = name;
    IPC(cuda_ipc_context_create(&config, &context));
    IPC(cuda_ipc_export(context, base, LENGTH, &shared));
    info.size = sizeof(info);
    IPC(cuda_ipc_export_info(shared, &info));
    if (info.handle_type == CUDA_IPC_TYPE_NO_IPC) {
        /* A transport would send this key all the same: it tells the importer to take another way. */
        fprintf(stderr, "this memory cannot be shared: %s\n", cuda_ipc_status_string(info.reason));
    }
    IPC(cuda_ipc_export_rkey(shared, rkey, sizeof(rkey), &length));

    address = socket_address(argv[1]);
    listener = SYSTEM(socket(AF_UNIX, SOCK_STREAM, 0));
    SYSTEM(bind(listener, (struct sockaddr *)&address, sizeof(address)));
    SYSTEM(listen(listener, 1));
    importer = SYSTEM(accept(listener, NULL, NULL));
    if (SYSTEM(write(importer, rkey, length)) != (int)length) {
        return 1;
    }
    /* The importer closes its end when it has what it wants. */
    while (SYSTEM(read(importer, &word, 1)) > 0) {
    }

    /* Before the memory goes, importers are told so. */
    IPC(cuda_ipc_retire(context, base, LENGTH, NULL));
    IPC(cuda_ipc_export_release(shared));
    IPC(cuda_ipc_context_destroy(context));
    CUDA(cuMemUnmap(base, LENGTH));
    CUDA(cuMemAddressFree(base, LENGTH));
    close(importer);
    close(listener);
    unlink(argv[1]);
    printf("exported %d chunks\n", (int)info.chunks);
    return 0;
}
