/*
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * What the files of the cuda-ipc lane know of each other. Nothing else of cuda_ipc includes this.
 */

#ifndef UCT_CUDA_IPC_LANE_INT_H
#define UCT_CUDA_IPC_LANE_INT_H

#include "cuda_ipc_lane.inl"


#if HAVE_CUDA_IPC_LANE

#include <ucs/datastruct/list.h>

#include <cuda_ipc.h>

/* How long a call may wait for another process, in nanoseconds: also the longest that a transfer can hold the progress up. */
#define UCT_CUDA_IPC_LANE_TIMEOUT_NS (10ull * 1000 * 1000 * 1000)

/* Text of the last error of this thread, for a log line. */
#define uct_cuda_ipc_lane_error_text() \
    ({ \
        cuda_ipc_error_t *_error = ucs_alloca(sizeof(cuda_ipc_error_t)); \
        memset(_error, 0, sizeof(*_error)); \
        _error->size = sizeof(*_error); \
        (cuda_ipc_last_error(_error) == CUDA_IPC_OK) ? _error->text : \
                                                       "no text"; \
    })


/* A lease and what is known of the work that uses it. Taken and given back by a shard, whose lock its fields have. */
typedef struct {
    ucs_list_link_t  list;  /* In `taken` or `unused` of the shard */
    ucs_list_link_t  held;  /* In `held` of an rkey, if it ends with that */
    unsigned         shard;
    cuda_ipc_lease_t lease; /* id 0: not leased yet, or ended already */
    CUevent          event; /* Of the copy that uses it; NULL if none was submitted */
    CUcontext        ctx;   /* That this was submitted in */
} uct_cuda_ipc_lane_lease_t;


/* The context, made now if it was not needed before; id 0 if there is none. */
cuda_ipc_context_t uct_cuda_ipc_lane_context(void);


/* A place for a lease, in the list of taken ones; NULL without memory. */
uct_cuda_ipc_lane_lease_t *uct_cuda_ipc_lane_lease_get(void);

/* Ends a lease, if it has not ended, and gives its place back. */
void uct_cuda_ipc_lane_lease_put(uct_cuda_ipc_lane_lease_t *lease);

/* As cuda_ipc_lease, for what is not mapped or was replaced. May import, and wait for copies of what was replaced. */
cuda_ipc_status_t
uct_cuda_ipc_lane_lease_slow(cuda_ipc_window_t window, uint64_t address,
                             size_t length, cuda_ipc_lease_t *lease,
                             uint64_t *local_address);

/* Ends what transfers have left that were running when their interface was closed, after their work. */
void uct_cuda_ipc_lane_leases_end(void);

/* Frees the places of leases that nobody has. */
void uct_cuda_ipc_lane_leases_cleanup(void);

#endif /* HAVE_CUDA_IPC_LANE */

#endif
