/*
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The leases of the cuda-ipc lane in cuda_ipc: which are taken, and what work uses them.
 *
 * A lease lasts as long as its transfer or its pointer. This file knows all that are taken, so that one which stands in the way of another can be waited for, and
 * so that those that are left when the last md closes are ended when their work is complete.
 */

#ifdef HAVE_CONFIG_H
#  include "config.h"
#endif

#include "cuda_ipc_lane_int.h"

#include <ucs/arch/cpu.h>
#include <ucs/debug/memtrack_int.h>
#include <ucs/type/spinlock.h>


#if HAVE_CUDA_IPC_LANE

/* How long it is taken for granted that such a call waits for nobody's work but that of others. */
#define UCT_CUDA_IPC_LANE_PATIENCE_NS (100ull * 1000 * 1000)


/*
 * Leases are kept in several lists, each with a lock, and threads begin with different ones: a thread that takes a lease and ends it meets nobody.
 */
#define UCT_CUDA_IPC_LANE_SHARDS 32

typedef struct {
    ucs_spinlock_t  lock;
    ucs_list_link_t taken;
    ucs_list_link_t unused;
} UCS_V_ALIGNED(UCS_ARCH_CACHE_LINE_SIZE) uct_cuda_ipc_lane_shard_t;

static uct_cuda_ipc_lane_shard_t
        uct_cuda_ipc_lane_shards[UCT_CUDA_IPC_LANE_SHARDS];

UCS_STATIC_INIT {
    unsigned i;

    for (i = 0; i < UCT_CUDA_IPC_LANE_SHARDS; ++i) {
        ucs_spinlock_init(&uct_cuda_ipc_lane_shards[i].lock, 0);
        ucs_list_head_init(&uct_cuda_ipc_lane_shards[i].taken);
        ucs_list_head_init(&uct_cuda_ipc_lane_shards[i].unused);
    }
}


uct_cuda_ipc_lane_lease_t *uct_cuda_ipc_lane_lease_get(void)
{
    static unsigned threads          = 0;
    static __thread unsigned shard   = UINT_MAX;
    uct_cuda_ipc_lane_lease_t *lease = NULL;
    uct_cuda_ipc_lane_shard_t *self;

    if (ucs_unlikely(shard == UINT_MAX)) {
        shard = __atomic_fetch_add(&threads, 1, __ATOMIC_RELAXED) %
                UCT_CUDA_IPC_LANE_SHARDS;
    }

    self = &uct_cuda_ipc_lane_shards[shard];
    ucs_spin_lock(&self->lock);
    if (ucs_likely(!ucs_list_is_empty(&self->unused))) {
        lease = ucs_list_extract_head(&self->unused, uct_cuda_ipc_lane_lease_t,
                                      list);
    } else {
        lease = ucs_malloc(sizeof(*lease), "uct_cuda_ipc_lane_lease");
    }

    if (ucs_likely(lease != NULL)) {
        lease->shard    = shard;
        lease->lease.id = 0;
        lease->event    = NULL;
        lease->ctx      = NULL;
        ucs_list_add_head(&self->taken, &lease->list);
    }
    ucs_spin_unlock(&self->lock);
    return lease;
}

void uct_cuda_ipc_lane_lease_put(uct_cuda_ipc_lane_lease_t *lease)
{
    uct_cuda_ipc_lane_shard_t *shard = &uct_cuda_ipc_lane_shards[lease->shard];
    cuda_ipc_lease_t ended;

    ucs_spin_lock(&shard->lock);
    ended = lease->lease;
    ucs_list_del(&lease->list);
    ucs_list_add_head(&shard->unused, &lease->list);
    ucs_spin_unlock(&shard->lock);

    if (ucs_likely(ended.id != 0)) {
        cuda_ipc_lease_end(ended);
    }
}

/* What is known of a taken lease, for a while without its lock. */
typedef struct {
    uct_cuda_ipc_lane_lease_t *lease;
    cuda_ipc_lease_t          id;
    CUevent                   event;
    CUcontext                 ctx;
} uct_cuda_ipc_lane_taken_t;

/* Lists up to `max` leases that are taken. */
static size_t
uct_cuda_ipc_lane_list_taken(uct_cuda_ipc_lane_taken_t *taken, size_t max)
{
    size_t count = 0;
    uct_cuda_ipc_lane_shard_t *shard;
    uct_cuda_ipc_lane_lease_t *lease;
    unsigned i;

    for (i = 0; i < UCT_CUDA_IPC_LANE_SHARDS; ++i) {
        shard = &uct_cuda_ipc_lane_shards[i];
        ucs_spin_lock(&shard->lock);
        ucs_list_for_each(lease, &shard->taken, list) {
            if ((lease->lease.id != 0) && (count < max)) {
                taken[count].lease = lease;
                taken[count].id    = lease->lease;
                taken[count].event = lease->event;
                taken[count].ctx   = lease->ctx;
                ++count;
            }
        }
        ucs_spin_unlock(&shard->lock);
    }

    return count;
}

/* Ends a lease before its owner does, who will find that done. The work that uses it must be complete. */
static void
uct_cuda_ipc_lane_end_early(const uct_cuda_ipc_lane_taken_t *taken)
{
    uct_cuda_ipc_lane_lease_t *lease = taken->lease;
    uct_cuda_ipc_lane_shard_t *shard = &uct_cuda_ipc_lane_shards[lease->shard];
    int is_same;

    ucs_spin_lock(&shard->lock);
    is_same = (lease->lease.id == taken->id.id);
    if (is_same) {
        lease->lease.id = 0;
    }
    ucs_spin_unlock(&shard->lock);

    if (is_same) {
        cuda_ipc_lease_end(taken->id);
    }
}

/* Most leases that are looked at, where somebody has to wait for them. */
#define UCT_CUDA_IPC_LANE_MAX_TAKEN 4096

/*
 * Leases what is not mapped, or was replaced. Where a chunk was replaced while copies of the old one run, these have to end first; but their ends are seen by the
 * progress that this call holds up. So the copies are waited for here, and their leases ended.
 */
cuda_ipc_status_t
uct_cuda_ipc_lane_lease_slow(cuda_ipc_window_t window, uint64_t address,
                             size_t length, cuda_ipc_lease_t *lease,
                             uint64_t *local_address)
{
    uct_cuda_ipc_lane_taken_t *taken;
    cuda_ipc_lease_t *holding;
    cuda_ipc_status_t status;
    size_t count, i;
    int retries;

    taken = ucs_malloc(UCT_CUDA_IPC_LANE_MAX_TAKEN *
                               (sizeof(*taken) + sizeof(*holding)),
                       "uct_cuda_ipc_lane_taken");
    if (taken == NULL) {
        return CUDA_IPC_ERR_NO_MEMORY;
    }

    holding = (cuda_ipc_lease_t*)(taken + UCT_CUDA_IPC_LANE_MAX_TAKEN);
    for (retries = 1; ; --retries) {
        count = uct_cuda_ipc_lane_list_taken(taken,
                                             UCT_CUDA_IPC_LANE_MAX_TAKEN);
        for (i = 0; i < count; ++i) {
            holding[i] = taken[i].id;
        }

        /* It is found out at once that it waits for one of these leases; for one that is not in the list, which has an end, after some time. */
        status = cuda_ipc_lease_holding(window, address, length,
                                        ((retries > 0) && (count > 0)) ?
                                                UCT_CUDA_IPC_LANE_PATIENCE_NS :
                                                UCT_CUDA_IPC_LANE_TIMEOUT_NS,
                                        holding, count, lease, local_address);
        if ((status != CUDA_IPC_WOULD_BLOCK) || (retries == 0)) {
            break;
        }

        for (i = 0; i < count; ++i) {
            if ((taken[i].event != NULL) &&
                (UCT_CUDADRV_FUNC(cuEventSynchronize(taken[i].event),
                                  UCS_LOG_LEVEL_DEBUG) == UCS_OK)) {
                uct_cuda_ipc_lane_end_early(&taken[i]);
            }
        }
    }

    ucs_free(taken);
    return status;
}

void uct_cuda_ipc_lane_submitted(const void *base_addr, CUevent event)
{
    uct_cuda_ipc_lane_lease_t *lease = (void*)((uintptr_t)base_addr & ~1ul);
    uct_cuda_ipc_lane_shard_t *shard = &uct_cuda_ipc_lane_shards[lease->shard];
    CUcontext ctx                    = NULL;

    cuCtxGetCurrent(&ctx);
    ucs_spin_lock(&shard->lock);
    lease->event = event;
    lease->ctx   = ctx;
    ucs_spin_unlock(&shard->lock);
}

void uct_cuda_ipc_lane_end(const void *base_addr)
{
    uct_cuda_ipc_lane_lease_put((void*)((uintptr_t)base_addr & ~1ul));
}

/* Ends what UCX has left: transfers that were running when their interface was closed. Nobody waits for these any more but this. */
void uct_cuda_ipc_lane_leases_end(void)
{
    uct_cuda_ipc_lane_taken_t *taken;
    size_t count, i;

    taken = ucs_malloc(UCT_CUDA_IPC_LANE_MAX_TAKEN * sizeof(*taken),
                       "uct_cuda_ipc_lane_taken");
    if (taken == NULL) {
        return;
    }

    count = uct_cuda_ipc_lane_list_taken(taken, UCT_CUDA_IPC_LANE_MAX_TAKEN);
    for (i = 0; i < count; ++i) {
        if (taken[i].event == NULL) {
            /* Somebody has a pointer. */
            continue;
        }

        /* The event is gone with the interface. A context that is gone has completed its work. */
        if (cuCtxPushCurrent(taken[i].ctx) == CUDA_SUCCESS) {
            UCT_CUDADRV_FUNC_LOG_WARN(cuCtxSynchronize());
            UCT_CUDADRV_FUNC_LOG_WARN(cuCtxPopCurrent(NULL));
        }
        uct_cuda_ipc_lane_end_early(&taken[i]);
        uct_cuda_ipc_lane_lease_put(taken[i].lease);
    }

    ucs_free(taken);
}

void uct_cuda_ipc_lane_leases_cleanup(void)
{
    uct_cuda_ipc_lane_lease_t *lease, *tmp;
    uct_cuda_ipc_lane_shard_t *shard;
    unsigned i;

    for (i = 0; i < UCT_CUDA_IPC_LANE_SHARDS; ++i) {
        shard = &uct_cuda_ipc_lane_shards[i];
        ucs_spin_lock(&shard->lock);
        ucs_list_for_each_safe(lease, tmp, &shard->unused, list) {
            ucs_list_del(&lease->list);
            ucs_free(lease);
        }
        ucs_spin_unlock(&shard->lock);
    }
}

#endif /* HAVE_CUDA_IPC_LANE */
