/*
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The importer's side of the cuda-ipc lane in cuda_ipc: unpacked rkeys, and what transfers and pointers need of them.
 *
 * Owns the windows of each rkey, which end with it. Mappings are libcuda_ipc's: UCX's cache of regions never sees them.
 */

#ifdef HAVE_CONFIG_H
#  include "config.h"
#endif

#include "cuda_ipc_lane_int.h"

#include <ucs/debug/log.h>
#include <ucs/debug/memtrack_int.h>
#include <ucs/sys/math.h>

#include <pthread.h>
#include <string.h>


#if HAVE_CUDA_IPC_LANE

/* First bytes of a payload. */
#define UCT_CUDA_IPC_LANE_MAGIC "CIPC"

/*
 * Bytes of the first part of a copy, and how much longer each part is than the one before. The driver's time to submit a copy grows with the number of physical
 * allocations in it, and the device waits meanwhile; a short first part hides that. A rest that is shorter than two parts is one.
 */
#ifndef UCT_CUDA_IPC_LANE_FIRST_PART
#define UCT_CUDA_IPC_LANE_FIRST_PART (64ul << 20)
#endif
#define UCT_CUDA_IPC_LANE_PART_GROWTH 2


struct uct_cuda_ipc_lane_rkey {
    uint8_t          payload[CUDA_IPC_PAYLOAD_LEN];
    CUdevice         cu_dev;      /* That it was unpacked for */
    pthread_mutex_t  lock;        /* Of the rest but `windows` */
    ucs_list_link_t  held;        /* Leases that end with the rkey */
    uint64_t         ptr_address; /* Of the whole key, for rkey_ptr; 0 if none */
    unsigned         num_devices;
    /* One for each device that has used the key; id 0 if none. Set once, read without a lock. */
    uint64_t         windows[];
};


/* Finds the payload in a packed handle. Up to UCX 1.21 it begins 4 bytes earlier than since then, and both ends may be either. */
static int uct_cuda_ipc_lane_find_payload(const uct_cuda_ipc_md_handle_t *ph,
                                          void *payload)
{
    const size_t offsets[] = {ucs_offsetof(uct_cuda_ipc_md_handle_t, handle), 4,
                              8};
    const char *bytes      = (const char*)ph;
    size_t i;

    /* UCP writes the length of an rkey in one byte. */
    UCS_STATIC_ASSERT(sizeof(uct_cuda_ipc_extended_rkey_t) <= UINT8_MAX);
    /* A payload takes the place of a legacy or fabric handle. */
    UCS_STATIC_ASSERT(CUDA_IPC_PAYLOAD_LEN <= sizeof(ph->handle));

    for (i = 0; i < ucs_static_array_size(offsets); ++i) {
        if ((offsets[i] + CUDA_IPC_PAYLOAD_LEN <= sizeof(*ph)) &&
            !memcmp(bytes + offsets[i], UCT_CUDA_IPC_LANE_MAGIC,
                    strlen(UCT_CUDA_IPC_LANE_MAGIC))) {
            memcpy(payload, bytes + offsets[i], CUDA_IPC_PAYLOAD_LEN);
            return 1;
        }
    }

    return 0;
}

/* The window of a key for a device, opened now if it was not used there before. */
static cuda_ipc_status_t
uct_cuda_ipc_lane_window(struct uct_cuda_ipc_lane_rkey *lane,
                         const uct_cuda_ipc_rkey_t *rkey, CUdevice cu_dev,
                         cuda_ipc_window_t *window)
{
    cuda_ipc_import_options_t options = {
        .size   = sizeof(options),
        .flags  = CUDA_IPC_IMPORT_WRITABLE,
        .device = cu_dev
    };
    cuda_ipc_context_t context;
    cuda_ipc_status_t status;
    uint64_t found = 0;

    if ((unsigned)cu_dev >= lane->num_devices) {
        return CUDA_IPC_ERR_ARGUMENT;
    }

    window->id = __atomic_load_n(&lane->windows[cu_dev], __ATOMIC_ACQUIRE);
    if (ucs_likely(window->id != 0)) {
        return CUDA_IPC_OK;
    }

    context = uct_cuda_ipc_lane_context();
    status  = cuda_ipc_import_payload(context, CUDA_IPC_TYPE_POSIX,
                                      lane->payload, CUDA_IPC_PAYLOAD_LEN,
                                      rkey->d_bptr, rkey->b_len, &options,
                                      UCT_CUDA_IPC_LANE_TIMEOUT_NS, window);
    if (status != CUDA_IPC_OK) {
        return status;
    }

    if (!__atomic_compare_exchange_n(&lane->windows[cu_dev], &found,
                                     window->id, 0, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE)) {
        /* Another thread was faster. */
        cuda_ipc_window_release(*window);
        window->id = found;
    }

    return CUDA_IPC_OK;
}

/* Leases a range of a key for a device. */
static cuda_ipc_status_t
uct_cuda_ipc_lane_lease(const uct_cuda_ipc_unpacked_rkey_t *unpacked,
                        uint64_t address, size_t length, CUdevice cu_dev,
                        cuda_ipc_lease_t *lease, uint64_t *local_address)
{
    const uct_cuda_ipc_rkey_t *rkey = &unpacked->super.super;
    cuda_ipc_window_t window;
    cuda_ipc_status_t status;

    status = uct_cuda_ipc_lane_window(unpacked->lane, rkey, cu_dev, &window);
    if (ucs_unlikely(status != CUDA_IPC_OK)) {
        return status;
    }

    /* Without time it is a hit, or asks for one. */
    status = cuda_ipc_lease(window, address, length, 0, lease, local_address);
    if (ucs_likely(status != CUDA_IPC_WOULD_BLOCK)) {
        return status;
    }

    return uct_cuda_ipc_lane_lease_slow(window, address, length, lease,
                                        local_address);
}

static ucs_status_t uct_cuda_ipc_lane_status(cuda_ipc_status_t status)
{
    switch (status) {
    case CUDA_IPC_OK:
        return UCS_OK;
    case CUDA_IPC_WOULD_BLOCK:
        return UCS_ERR_TIMED_OUT;
    case CUDA_IPC_ERR_NO_MEMORY:
        return UCS_ERR_NO_MEMORY;
    case CUDA_IPC_ERR_NO_CHUNK:
        return UCS_ERR_INVALID_ADDR;
    default:
        return UCS_ERR_IO_ERROR;
    }
}

ucs_status_t uct_cuda_ipc_lane_rkey_open(uct_cuda_ipc_unpacked_rkey_t *rkey,
                                         CUdevice cu_dev)
{
    const uct_cuda_ipc_rkey_t *packed = &rkey->super.super;
    const uint64_t *uuid              = (const uint64_t*)packed->uuid.bytes;
    struct uct_cuda_ipc_lane_rkey *lane;
    cuda_ipc_lease_t lease;
    cuda_ipc_status_t status;
    uint64_t address;
    int num_devices;

    if (!uct_cuda_ipc_lane_is_on() ||
        (UCT_CUDADRV_FUNC_LOG_DEBUG(cuDeviceGetCount(&num_devices)) !=
         UCS_OK)) {
        return UCS_ERR_UNREACHABLE;
    }

    lane = ucs_calloc(1,
                      sizeof(*lane) +
                              (num_devices * sizeof(lane->windows[0])),
                      "uct_cuda_ipc_lane_rkey");
    if (lane == NULL) {
        return UCS_ERR_UNREACHABLE;
    }

    lane->cu_dev      = cu_dev;
    lane->num_devices = num_devices;
    ucs_list_head_init(&lane->held);
    pthread_mutex_init(&lane->lock, NULL);
    rkey->lane = lane;
    if (!uct_cuda_ipc_lane_find_payload(&packed->ph, lane->payload)) {
        ucs_debug("a key for POSIX file descriptors has no payload");
        goto err;
    }

    /* One chunk proves the way to all: the exporter lets its fds be fetched, and the device can map them. */
    status = uct_cuda_ipc_lane_lease(rkey, packed->d_bptr, 1, cu_dev, &lease,
                                     &address);
    if (status != CUDA_IPC_OK) {
        ucs_debug("0x%llx of process %d is not reachable: %s",
                  (unsigned long long)packed->d_bptr, packed->pid,
                  uct_cuda_ipc_lane_error_text());
        goto err;
    }

    cuda_ipc_lease_end(lease);
    /* As UCX does it: one stream for each GPU of each peer, so that these do not wait for each other. */
    rkey->stream_id = (uuid[0] ^ uuid[1] ^ packed->pid) & INT_MAX;
    return UCS_OK;

err:
    uct_cuda_ipc_lane_rkey_close(rkey);
    return UCS_ERR_UNREACHABLE;
}

void uct_cuda_ipc_lane_rkey_close(uct_cuda_ipc_unpacked_rkey_t *rkey)
{
    struct uct_cuda_ipc_lane_rkey *lane = rkey->lane;
    uct_cuda_ipc_lane_lease_t *lease, *tmp;
    cuda_ipc_window_t window;
    unsigned i;

    if (lane == NULL) {
        return;
    }

    ucs_list_for_each_safe(lease, tmp, &lane->held, held) {
        uct_cuda_ipc_lane_lease_put(lease);
    }

    for (i = 0; i < lane->num_devices; ++i) {
        window.id = lane->windows[i];
        if (window.id != 0) {
            cuda_ipc_window_release(window);
        }
    }

    pthread_mutex_destroy(&lane->lock);
    ucs_free(lane);
    rkey->lane = NULL;
}

/* Leases a range with a place of its own, and says why not. */
static ucs_status_t
uct_cuda_ipc_lane_take(const uct_cuda_ipc_unpacked_rkey_t *unpacked,
                       uint64_t address, size_t length, CUdevice cu_dev,
                       uint64_t *local_address,
                       uct_cuda_ipc_lane_lease_t **lease_p)
{
    uct_cuda_ipc_lane_lease_t *lease;
    cuda_ipc_lease_t taken;
    cuda_ipc_status_t status;

    lease = uct_cuda_ipc_lane_lease_get();
    if (ucs_unlikely(lease == NULL)) {
        ucs_error("failed to allocate uct_cuda_ipc_lane_lease");
        return UCS_ERR_NO_MEMORY;
    }

    /* A list of buffers may have empty ones. */
    status = uct_cuda_ipc_lane_lease(unpacked, address, ucs_max(length, 1),
                                     cu_dev, &taken, local_address);
    if (ucs_unlikely(status != CUDA_IPC_OK)) {
        ucs_error("cannot use 0x%lx..0x%lx of process %d: %s", address,
                  address + length, unpacked->super.super.pid,
                  uct_cuda_ipc_lane_error_text());
        uct_cuda_ipc_lane_lease_put(lease);
        return uct_cuda_ipc_lane_status(status);
    }

    /* Whoever lists the leases sees 0 or this. */
    __atomic_store_n(&lease->lease.id, taken.id, __ATOMIC_RELEASE);
    *lease_p = lease;
    return UCS_OK;
}

ucs_status_t
uct_cuda_ipc_lane_map(uct_cuda_ipc_extended_rkey_t *rkey, uint64_t raddr,
                      size_t length, CUdevice cu_dev, void **laddr_p,
                      const void **base_addr_p)
{
    const uct_cuda_ipc_unpacked_rkey_t *unpacked =
            ucs_container_of(rkey, uct_cuda_ipc_unpacked_rkey_t, super);
    uct_cuda_ipc_lane_lease_t *lease;
    uint64_t local_address;
    ucs_status_t status;

    status = uct_cuda_ipc_lane_take(unpacked, raddr, length, cu_dev,
                                    &local_address, &lease);
    if (ucs_unlikely(status != UCS_OK)) {
        return status;
    }

    *laddr_p     = (void*)(uintptr_t)local_address;
    *base_addr_p = (void*)((uintptr_t)lease | 1);
    return UCS_OK;
}

CUresult uct_cuda_ipc_lane_copy_parts(CUdeviceptr dst, CUdeviceptr src,
                                      size_t length, CUstream stream)
{
    size_t part = UCT_CUDA_IPC_LANE_FIRST_PART;
    size_t done, now;
    CUresult result;

    for (done = 0; done < length; done += now) {
        now    = ((length - done) / 2 < part) ? (length - done) : part;
        result = cuMemcpyDtoDAsync(dst + done, src + done, now, stream);
        if (ucs_unlikely(result != CUDA_SUCCESS)) {
            if (done > 0) {
                /* The caller takes this for a copy that never ran, and ends the lease. */
                cuStreamSynchronize(stream);
            }
            return result;
        }
        part *= UCT_CUDA_IPC_LANE_PART_GROWTH;
    }

    return CUDA_SUCCESS;
}

ucs_status_t uct_cuda_ipc_lane_rkey_ptr(uct_rkey_t uct_rkey, uint64_t raddr,
                                        void **laddr_p)
{
    const uct_cuda_ipc_unpacked_rkey_t *unpacked =
            (uct_cuda_ipc_unpacked_rkey_t*)uct_rkey;
    const uct_cuda_ipc_rkey_t *rkey              = &unpacked->super.super;
    struct uct_cuda_ipc_lane_rkey *lane          = unpacked->lane;
    uct_cuda_ipc_lane_lease_t *lease;
    ucs_status_t status = UCS_OK;

    if ((raddr < rkey->d_bptr) || (raddr - rkey->d_bptr >= rkey->b_len)) {
        return UCS_ERR_INVALID_ADDR;
    }

    pthread_mutex_lock(&lane->lock);
    if (lane->ptr_address == 0) {
        status = uct_cuda_ipc_lane_take(unpacked, rkey->d_bptr, rkey->b_len,
                                        lane->cu_dev, &lane->ptr_address,
                                        &lease);
        if (status == UCS_OK) {
            ucs_list_add_tail(&lane->held, &lease->held);
        }
    }

    if (status == UCS_OK) {
        *laddr_p = (void*)(uintptr_t)(lane->ptr_address +
                                      (raddr - rkey->d_bptr));
    }
    pthread_mutex_unlock(&lane->lock);
    return status;
}

ucs_status_t
uct_cuda_ipc_lane_mem_elem_pack(uct_cuda_ipc_unpacked_rkey_t *unpacked,
                                ptrdiff_t *offset_p, void **release_handle_p)
{
    const uct_cuda_ipc_rkey_t *rkey = &unpacked->super.super;
    uct_cuda_ipc_lane_lease_t *lease;
    uint64_t local_address;
    ucs_status_t status;
    CUdevice cu_dev;

    if (UCT_CUDADRV_FUNC_LOG_DEBUG(cuCtxGetDevice(&cu_dev)) != UCS_OK) {
        return UCS_ERR_UNREACHABLE;
    }

    status = uct_cuda_ipc_lane_take(unpacked, rkey->d_bptr, rkey->b_len, cu_dev,
                                    &local_address, &lease);
    if (status != UCS_OK) {
        return status;
    }

    *offset_p = local_address - rkey->d_bptr;
    if (release_handle_p != NULL) {
        *release_handle_p = (void*)((uintptr_t)lease | 1);
        return UCS_OK;
    }

    pthread_mutex_lock(&unpacked->lane->lock);
    ucs_list_add_tail(&unpacked->lane->held, &lease->held);
    pthread_mutex_unlock(&unpacked->lane->lock);
    return UCS_OK;
}

#endif /* HAVE_CUDA_IPC_LANE */
