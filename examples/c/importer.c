/*
 * The smallest importer: takes a key from a socket, reads the memory that it names, and compares every byte.
 *
 *     importer SOCKET
 */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif

#include "common.h"
#include "driver.h"

/* Ten seconds, far more than an import takes. */
#define PATIENCE ((uint64_t)10 * 1000 * 1000 * 1000)

int main(int argc, char **argv)
{
    unsigned char rkey[CUDA_IPC_RKEY_LEN];
    unsigned char *bytes;
    char name[] = "importer";
    cuda_ipc_config_t config;
    cuda_ipc_import_options_t options;
    cuda_ipc_context_t context;
    cuda_ipc_window_t window;
    cuda_ipc_window_info_t info;
    cuda_ipc_lease_t lease;
    uint64_t local;
    size_t offset;
    int exporter;

    if (argc != 2) {
        fprintf(stderr, "usage: importer SOCKET\n");
        return 64;
    }
    open_driver();
    exporter = receive_rkey(argv[1], rkey);

    IPC(cuda_ipc_config_init(&config, sizeof(config)));
    config.log = print_log;
    config.log_user = name;
    IPC(cuda_ipc_context_create(&config, &context));
    memset(&options, 0, sizeof(options));
    options.size = sizeof(options);
    options.flags = CUDA_IPC_IMPORT_CURRENT_DEVICE;
    IPC(cuda_ipc_import(context, rkey, sizeof(rkey), &options, PATIENCE, &window));
    info.size = sizeof(info);
    IPC(cuda_ipc_window_info(window, &info));

    /* One lease for each use of the memory. The first one maps it. */
    IPC(cuda_ipc_lease(window, info.base, info.length, PATIENCE, &lease, &local));
    bytes = (unsigned char *)malloc((size_t)info.length);
    if (bytes == NULL) {
        return 1;
    }
    CUDA(cuMemcpyDtoH_v2(bytes, local, (size_t)info.length));
    /* The copy is complete, so the lease may end. */
    IPC(cuda_ipc_lease_end(lease));
    for (offset = 0; offset < info.length; offset++) {
        if (bytes[offset] != pattern(offset)) {
            fprintf(stderr, "wrong byte at %zu\n", offset);
            return 1;
        }
    }
    free(bytes);

    IPC(cuda_ipc_window_release(window));
    IPC(cuda_ipc_context_destroy(context));
    close(exporter);
    printf("verified %zu bytes of process %u\n", offset, (unsigned)info.pid);
    return 0;
}
