/* What both examples share: how they report errors, and a Unix socket between them. */
#ifndef EXAMPLE_COMMON_H
#define EXAMPLE_COMMON_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/un.h>
#include <unistd.h>

#include "cuda_ipc.h"

/* Ends the program if a call of cuda-ipc fails, with all that is known of why. */
static inline void check_ipc(cuda_ipc_status_t status, const char *what)
{
    cuda_ipc_error_t error;

    if (status == CUDA_IPC_OK) {
        return;
    }
    error.size = sizeof(error);
    if (cuda_ipc_last_error(&error) == CUDA_IPC_OK) {
        fprintf(stderr, "%s: %s (%d): %s\n", what, cuda_ipc_status_string(status), (int)status, error.text);
    }
    exit(1);
}

#define IPC(call) check_ipc((call), #call)

/* Ends the program if a system call fails. */
static inline int check_system(int result, const char *what)
{
    if (result < 0) {
        perror(what);
        exit(1);
    }
    return result;
}

#define SYSTEM(call) check_system((int)(call), #call)

static inline struct sockaddr_un socket_address(const char *path)
{
    struct sockaddr_un address;

    memset(&address, 0, sizeof(address));
    address.sun_family = AF_UNIX;
    if (strlen(path) >= sizeof(address.sun_path)) {
        fprintf(stderr, "%s: too long for a socket\n", path);
        exit(1);
    }
    strcpy(address.sun_path, path);
    return address;
}

/* Connects to an exporter, which may still be at its beginning, and reads its key: CUDA_IPC_RKEY_LEN bytes. The exporter stays until the socket is closed. */
static inline int receive_rkey(const char *path, unsigned char *rkey)
{
    struct sockaddr_un address = socket_address(path);
    int exporter = SYSTEM(socket(AF_UNIX, SOCK_STREAM, 0));
    size_t length = 0;
    int tries;

    for (tries = 0; connect(exporter, (struct sockaddr *)&address, sizeof(address)) != 0; tries++) {
        struct timeval pause = {0, 10000};

        if (tries == 1000) {
            perror(path);
            exit(1);
        }
        select(0, NULL, NULL, NULL, &pause);
    }
    while (length < CUDA_IPC_RKEY_LEN) {
        int part = SYSTEM(read(exporter, rkey + length, CUDA_IPC_RKEY_LEN - length));

        if (part == 0) {
            fprintf(stderr, "%s: closed after %zu bytes\n", path, length);
            exit(1);
        }
        length += (size_t)part;
    }
    return exporter;
}

/* Lines of the library's log go to standard error. */
static inline void print_log(int32_t level, const char *line, void *user)
{
    fprintf(stderr, "%s: level %d: %s\n", (const char *)user, (int)level, line);
}

#endif
