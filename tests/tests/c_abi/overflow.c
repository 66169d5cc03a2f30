/*
 * Deliberate mistakes that only AddressSanitizer stops: the proof that it is there, in this program and in what the library writes.
 *
 *     overflow mine|library|leak
 */
#include "common.h"
#include "driver.h"

int main(int argc, char **argv)
{
    volatile unsigned char *bytes = (volatile unsigned char *)malloc(50);
    int host = 0;

    if (argc != 2 || bytes == NULL) {
        return 64;
    }
    if (strcmp(argv[1], "mine") == 0) {
        bytes[50 + argc - 2] = 1;
    } else if (strcmp(argv[1], "leak") == 0) {
        bytes[0] = 7;
        printf("nobody keeps this: %d\n", bytes[0]);
        bytes = NULL;
        return 0;
    } else {
        cuda_ipc_context_t context;
        cuda_ipc_export_t shared;
        size_t length;

        open_driver();
        IPC(cuda_ipc_context_create(NULL, &context));
        IPC(cuda_ipc_export(context, (uint64_t)(uintptr_t)&host, sizeof(host), &shared));
        /* The library is told of more room than there is. */
        IPC(cuda_ipc_export_rkey(shared, (void *)bytes, CUDA_IPC_RKEY_LEN, &length));
    }
    printf("nobody stopped this: %d\n", bytes[0]);
    return 0;
}
