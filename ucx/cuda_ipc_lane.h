/*
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The cuda-ipc lane in UCX's cuda_ipc transport: its settings, and what cuda_ipc's own structures hold of it.
 *
 * The lane shares memory that can leave its process only as POSIX file descriptors (cuMemCreate, PyTorch's expandable segments), by libcuda_ipc. This file is
 * included by cuda_ipc_md.h, so it names no type of cuda_ipc; the calls are declared in cuda_ipc_lane.inl.
 */

#ifndef UCT_CUDA_IPC_LANE_H
#define UCT_CUDA_IPC_LANE_H

#include <ucs/config/types.h>


/* Whether configure has found libcuda_ipc. Without it every call of the lane is a constant, and cuda_ipc is as it was. */
#ifndef HAVE_CUDA_IPC_LANE
#define HAVE_CUDA_IPC_LANE 0
#endif


/*
 * The lane's own number where uct_cuda_ipc_key_handle_t stands in an rkey: "CIPC". Far from UCX's numbers, which count from 0, and with a low byte of its own,
 * because cuda_ipc remembers by that byte alone which kinds of handle were refused.
 */
#define UCT_CUDA_IPC_LANE_HANDLE_TYPE 0x43495043


/* In the flags of a device address, beside uct_cuda_ipc_device_addr_flags_t: this process has the lane. UCX counts its flags from bit 0. */
#define UCT_CUDA_IPC_LANE_DEV_ADDR_FLAG 0x80


/* UCX_CUDA_IPC_POSIX_FD and UCX_CUDA_IPC_POSIX_FD_ROUTE. */
typedef struct {
    ucs_ternary_auto_value_t posix_fd; /* y, n or try */
    unsigned                 route;    /* Index in uct_cuda_ipc_lane_route_names */
} uct_cuda_ipc_lane_config_t;


extern const char *uct_cuda_ipc_lane_route_names[];


/* Rows of uct_cuda_ipc_md_config_table, whose structure has a member `lane`. */
#define UCT_CUDA_IPC_LANE_CONFIG_FIELDS \
    {"POSIX_FD", "try", \
     "Share memory that has no legacy IPC handle by POSIX file descriptors, with\n" \
     "libcuda_ipc: whole registrations, of any number of physical allocations.\n" \
     "  y   - do, and say an error if that is not possible in this process\n" \
     "  try - do if it is possible\n" \
     "  n   - do not; such keys of other processes are refused", \
     ucs_offsetof(uct_cuda_ipc_md_config_t, lane.posix_fd), \
     UCS_CONFIG_TYPE_TERNARY}, \
\
    {"POSIX_FD_ROUTE", "auto", \
     "How file descriptors are fetched from the exporting process.\n" \
     "  auto   - by pidfd_getfd where the kernel allows that, else by the broker\n" \
     "  pidfd  - by pidfd_getfd only\n" \
     "  broker - by a Unix socket of the exporting process only", \
     ucs_offsetof(uct_cuda_ipc_md_config_t, lane.route), \
     UCS_CONFIG_TYPE_ENUM(uct_cuda_ipc_lane_route_names)},


/* What the lane keeps for a registration (uct_cuda_ipc_memh_t), and for an unpacked rkey (uct_cuda_ipc_unpacked_rkey_t). */
struct uct_cuda_ipc_lane_memh;
struct uct_cuda_ipc_lane_rkey;

#endif
