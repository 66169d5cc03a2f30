/*
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * What cuda_ipc calls of the lane. Each of these costs one comparison where the memory is not the lane's.
 */

#ifndef UCT_CUDA_IPC_LANE_INL
#define UCT_CUDA_IPC_LANE_INL

#include <uct/cuda/cuda_ipc/cuda_ipc_lane.h>
#include <uct/cuda/cuda_ipc/cuda_ipc.inl>


#if HAVE_CUDA_IPC_LANE

/* An md is opened and closed. Never fails. The settings of the first md that is open hold for all. */
void uct_cuda_ipc_lane_open(const uct_cuda_ipc_lane_config_t *config);
void uct_cuda_ipc_lane_close(void);

/* Whether the settings of the open mds want it. */
int uct_cuda_ipc_lane_is_on(void);

/* What a registration of [address, address + length) needs; NULL if the lane is off. */
struct uct_cuda_ipc_lane_memh *
uct_cuda_ipc_lane_mem_reg(void *address, size_t length);

/*
 * Gives in *key_p a key of memh that covers [address, address + length): one that is there, or a new one for the whole registration if the memory is the
 * lane's. Any other answer than UCS_OK means that nothing was done, and that cuda_ipc is to go on as without the lane.
 */
ucs_status_t
uct_cuda_ipc_lane_mem_add_reg(void *address, size_t length,
                              uct_cuda_ipc_memh_t *memh,
                              uct_cuda_ipc_lkey_t **key_p);

/* The registration ends: importers see its memory go. */
void uct_cuda_ipc_lane_mem_dereg(uct_cuda_ipc_memh_t *memh);

/*
 * Opens a key of the lane for a device and proves the way to its memory. UCS_ERR_UNREACHABLE if there is none, and then nothing has to be closed. The answer is
 * about this key: it is not kept for others.
 */
ucs_status_t uct_cuda_ipc_lane_rkey_open(uct_cuda_ipc_unpacked_rkey_t *rkey,
                                         CUdevice cu_dev);
void uct_cuda_ipc_lane_rkey_close(uct_cuda_ipc_unpacked_rkey_t *rkey);

/*
 * Leases [raddr, raddr + length) of a key of the lane for one transfer: its address here in *laddr_p, and in *base_addr_p what uct_cuda_ipc_lane_unmap takes
 * back when the transfer is complete. That is a number, not an address.
 */
ucs_status_t
uct_cuda_ipc_lane_map(uct_cuda_ipc_extended_rkey_t *rkey, uint64_t raddr,
                      size_t length, CUdevice cu_dev, void **laddr_p,
                      const void **base_addr_p);
void uct_cuda_ipc_lane_end(const void *base_addr);
void uct_cuda_ipc_lane_submitted(const void *base_addr, CUevent event);

/* Copies in parts, which the stream keeps in order. After an error nothing of it runs. */
CUresult uct_cuda_ipc_lane_copy_parts(CUdeviceptr dst, CUdeviceptr src,
                                      size_t length, CUstream stream);

/* A pointer that is good until the rkey is released. */
ucs_status_t uct_cuda_ipc_lane_rkey_ptr(uct_rkey_t rkey, uint64_t raddr,
                                        void **laddr_p);

/*
 * The distance from the exporter's addresses to those of the current device. Good until *release_handle_p is released, or with release_handle_p NULL until the
 * rkey is.
 */
ucs_status_t
uct_cuda_ipc_lane_mem_elem_pack(uct_cuda_ipc_unpacked_rkey_t *rkey,
                                ptrdiff_t *offset_p, void **release_handle_p);


static UCS_F_ALWAYS_INLINE int
uct_cuda_ipc_lane_is_key(const uct_cuda_ipc_extended_rkey_t *rkey)
{
    return (unsigned)rkey->super.ph.handle_type ==
           UCT_CUDA_IPC_LANE_HANDLE_TYPE;
}

/* Ends a lease, if base_addr is of one. Addresses of mappings are even, what stands for a lease is odd. */
static UCS_F_ALWAYS_INLINE int uct_cuda_ipc_lane_unmap(const void *base_addr)
{
    if (ucs_likely(!((uintptr_t)base_addr & 1))) {
        return 0;
    }

    uct_cuda_ipc_lane_end(base_addr);
    return 1;
}

/* Stands where cuMemcpyDtoDAsync stood. */
static UCS_F_ALWAYS_INLINE CUresult
uct_cuda_ipc_lane_copy(const void *base_addr, CUdeviceptr dst, CUdeviceptr src,
                       size_t length, CUstream stream)
{
    if (ucs_likely(!((uintptr_t)base_addr & 1))) {
        return cuMemcpyDtoDAsync(dst, src, length, stream);
    }

    return uct_cuda_ipc_lane_copy_parts(dst, src, length, stream);
}

/* The copy of a transfer is submitted, and the event recorded that comes behind it. */
static UCS_F_ALWAYS_INLINE void
uct_cuda_ipc_lane_set_event(const void *base_addr, CUevent event)
{
    if (ucs_unlikely((uintptr_t)base_addr & 1)) {
        uct_cuda_ipc_lane_submitted(base_addr, event);
    }
}

#else

static UCS_F_ALWAYS_INLINE void
uct_cuda_ipc_lane_open(const uct_cuda_ipc_lane_config_t *config)
{
    if (config->posix_fd == UCS_YES) {
        ucs_error("UCX_CUDA_IPC_POSIX_FD=y: UCX was built without libcuda_ipc");
    }
}

static UCS_F_ALWAYS_INLINE void uct_cuda_ipc_lane_close(void)
{
}

static UCS_F_ALWAYS_INLINE int uct_cuda_ipc_lane_is_on(void)
{
    return 0;
}

static UCS_F_ALWAYS_INLINE struct uct_cuda_ipc_lane_memh *
uct_cuda_ipc_lane_mem_reg(void *address, size_t length)
{
    return NULL;
}

static UCS_F_ALWAYS_INLINE ucs_status_t
uct_cuda_ipc_lane_mem_add_reg(void *address, size_t length,
                              uct_cuda_ipc_memh_t *memh,
                              uct_cuda_ipc_lkey_t **key_p)
{
    return UCS_ERR_UNSUPPORTED;
}

static UCS_F_ALWAYS_INLINE void
uct_cuda_ipc_lane_mem_dereg(uct_cuda_ipc_memh_t *memh)
{
}

static UCS_F_ALWAYS_INLINE ucs_status_t
uct_cuda_ipc_lane_rkey_open(uct_cuda_ipc_unpacked_rkey_t *rkey, CUdevice cu_dev)
{
    return UCS_ERR_UNREACHABLE;
}

static UCS_F_ALWAYS_INLINE void
uct_cuda_ipc_lane_rkey_close(uct_cuda_ipc_unpacked_rkey_t *rkey)
{
}

static UCS_F_ALWAYS_INLINE ucs_status_t
uct_cuda_ipc_lane_map(uct_cuda_ipc_extended_rkey_t *rkey, uint64_t raddr,
                      size_t length, CUdevice cu_dev, void **laddr_p,
                      const void **base_addr_p)
{
    return UCS_ERR_UNSUPPORTED;
}

static UCS_F_ALWAYS_INLINE ucs_status_t
uct_cuda_ipc_lane_rkey_ptr(uct_rkey_t rkey, uint64_t raddr, void **laddr_p)
{
    return UCS_ERR_UNSUPPORTED;
}

static UCS_F_ALWAYS_INLINE ucs_status_t
uct_cuda_ipc_lane_mem_elem_pack(uct_cuda_ipc_unpacked_rkey_t *rkey,
                                ptrdiff_t *offset_p, void **release_handle_p)
{
    return UCS_ERR_UNSUPPORTED;
}

static UCS_F_ALWAYS_INLINE int
uct_cuda_ipc_lane_is_key(const uct_cuda_ipc_extended_rkey_t *rkey)
{
    return 0;
}

static UCS_F_ALWAYS_INLINE int uct_cuda_ipc_lane_unmap(const void *base_addr)
{
    return 0;
}

static UCS_F_ALWAYS_INLINE CUresult
uct_cuda_ipc_lane_copy(const void *base_addr, CUdeviceptr dst, CUdeviceptr src,
                       size_t length, CUstream stream)
{
    return cuMemcpyDtoDAsync(dst, src, length, stream);
}

static UCS_F_ALWAYS_INLINE void
uct_cuda_ipc_lane_set_event(const void *base_addr, CUevent event)
{
}

#endif /* HAVE_CUDA_IPC_LANE */


/* Whether peers have to be told that this process has the lane: where they may be in another PID namespace. */
static UCS_F_ALWAYS_INLINE int uct_cuda_ipc_lane_is_apart(void)
{
    return uct_cuda_ipc_lane_is_on() &&
           !ucs_sys_ns_is_default(UCS_SYS_NS_TYPE_PID);
}

static UCS_F_ALWAYS_INLINE uint8_t uct_cuda_ipc_lane_dev_addr_flag(void)
{
    return uct_cuda_ipc_lane_is_apart() ? UCT_CUDA_IPC_LANE_DEV_ADDR_FLAG : 0;
}

/* Whether the lane reaches a peer of this machine that has sent these flags. */
static UCS_F_ALWAYS_INLINE int uct_cuda_ipc_lane_reaches(uint8_t flags)
{
    return uct_cuda_ipc_lane_is_on() &&
           (flags & UCT_CUDA_IPC_LANE_DEV_ADDR_FLAG);
}


/*
 * Stands where uct_cuda_ipc_get_remote_address stood, and knows the length. A macro, because the type of _base_addr_p is not the same in all releases.
 */
#define uct_cuda_ipc_lane_get_remote_address(_length, _rkey, _raddr, _cu_dev, \
                                             _laddr_p, _base_addr_p) \
    (ucs_likely(!uct_cuda_ipc_lane_is_key(_rkey)) ? \
             uct_cuda_ipc_get_remote_address(_rkey, _raddr, _cu_dev, _laddr_p, \
                                             _base_addr_p) : \
             uct_cuda_ipc_lane_map(_rkey, _raddr, _length, _cu_dev, _laddr_p, \
                                   (const void**)(_base_addr_p)))

#endif
