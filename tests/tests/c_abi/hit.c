/*
 * What a hit costs beside time: no allocation and no system call. One thread counts what is allocated; another has the kernel end the process at its first
 * system call that is not read, write or exit.
 *
 *     hit SOCKET      with the example exporter at the socket
 *     hit strict      makes a system call under the same rule, which has to be its end
 */
#define _GNU_SOURCE

#include "common.h"
#include "driver.h"

#include <errno.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#define CHUNK ((uint64_t)2 << 20)
#define CHUNKS 5
#define ROUNDS 10000

/* The allocator of the whole process, the library's too: the C library's own, counted for each thread, since the library's own threads may allocate. */
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *old, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);

static __thread unsigned long allocations;
#define COUNT() allocations++

void *malloc(size_t size) { COUNT(); return __libc_malloc(size); }
void *calloc(size_t count, size_t size) { COUNT(); return __libc_calloc(count, size); }
void *realloc(void *old, size_t size) { COUNT(); return __libc_realloc(old, size); }
int posix_memalign(void **at, size_t alignment, size_t size)
{
    COUNT();
    *at = __libc_memalign(alignment, size);
    return *at == NULL ? ENOMEM : 0;
}

static cuda_ipc_window_t window;
static cuda_ipc_window_info_t info;

/* Hits of every kind; whether all were. */
static int hits(void)
{
    cuda_ipc_lease_t lease, held;
    uint64_t local;
    int round;

    if (cuda_ipc_lease(window, info.base, 1, 0, &held, &local) != CUDA_IPC_OK) {
        return 0;
    }
    for (round = 0; round < ROUNDS; round++) {
        uint64_t offset = (uint64_t)(round % CHUNKS) * CHUNK;

        if (cuda_ipc_lease(window, info.base + offset, 64, 0, &lease, &local) != CUDA_IPC_OK || local != info.local_base + offset ||
            cuda_ipc_lease_end(lease) != CUDA_IPC_OK) {
            return 0;
        }
        if (cuda_ipc_lease(window, info.base, CHUNKS * CHUNK, CUDA_IPC_FOREVER, &lease, &local) != CUDA_IPC_OK ||
            cuda_ipc_lease_end(lease) != CUDA_IPC_OK) {
            return 0;
        }
        /* A mistake costs no more. */
        if (cuda_ipc_lease_end(lease) != CUDA_IPC_ERR_STALE_HANDLE) {
            return 0;
        }
    }
    return cuda_ipc_lease_end(held) == CUDA_IPC_OK;
}

static void end_thread(void)
{
    for (;;) {
        syscall(SYS_exit, 0);
    }
}

static void *strictly(void *answer)
{
    char word = 'n';
    int number = *(int *)answer;
    cuda_ipc_lease_t lease;
    uint64_t local;

    /* A thread's first lease makes room for its leases. */
    IPC(cuda_ipc_lease(window, info.base, 1, 0, &lease, &local));
    IPC(cuda_ipc_lease_end(lease));
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) != 0) {
        word = 's';
    } else if (hits()) {
        word = 'y';
    }
    if (write(number, &word, 1) != 1) {
        abort();
    }
    end_thread();
    return NULL;
}

int main(int argc, char **argv)
{
    unsigned char rkey[CUDA_IPC_RKEY_LEN];
    cuda_ipc_context_t context;
    cuda_ipc_lease_t lease;
    unsigned long before;
    pthread_t thread;
    uint64_t local;
    char word = 0;
    int pipes[2];

    if (argc != 2) {
        fprintf(stderr, "usage: hit SOCKET\n");
        return 64;
    }
    if (strcmp(argv[1], "strict") == 0) {
        if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) != 0) {
            printf("strict mode is not to be had\n");
            return 0;
        }
        syscall(SYS_getppid);
        end_thread();
    }
    /* The rule ends only the thread that breaks it, and nobody answers then. */
    alarm(20);
    open_driver();
    (void)receive_rkey(argv[1], rkey);
    IPC(cuda_ipc_context_create(NULL, &context));
    IPC(cuda_ipc_import(context, rkey, sizeof(rkey), NULL, CUDA_IPC_FOREVER, &window));
    info.size = sizeof(info);
    IPC(cuda_ipc_window_info(window, &info));
    IPC(cuda_ipc_lease(window, info.base, info.length, CUDA_IPC_FOREVER, &lease, &local));
    IPC(cuda_ipc_lease_end(lease));
    IPC(cuda_ipc_window_info(window, &info));

    before = allocations;
    if (before < 10 || !hits()) {
        fprintf(stderr, "no hits, or nothing is counted\n");
        return 1;
    }
    if (allocations != before) {
        fprintf(stderr, "%lu allocations\n", allocations - before);
        return 1;
    }
    SYSTEM(pipe(pipes));
    if (pthread_create(&thread, NULL, strictly, &pipes[1]) != 0 || read(pipes[0], &word, 1) != 1 || (word != 'y' && word != 's')) {
        fprintf(stderr, "hits under strict mode: %c\n", word);
        return 1;
    }
    printf("hits: %d, no allocation%s\n", ROUNDS, word == 'y' ? ", no system call" : "; strict mode is not to be had");
    /* Not by way of main's end: the thread has left without the C library's knowledge. */
    fflush(stdout);
    _exit(0);
}
