/*
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The exporter's side of the cuda-ipc lane in cuda_ipc: registrations and the keys that are packed for them.
 *
 * Owns the exports of each registration, which end with it. Whether memory is the lane's is decided here, from what the driver says of its first address.
 */

#ifdef HAVE_CONFIG_H
#  include "config.h"
#endif

#include "cuda_ipc_lane_int.h"

#include <ucs/debug/log.h>
#include <ucs/debug/memtrack_int.h>
#include <ucs/sys/math.h>

#include <string.h>


#if HAVE_CUDA_IPC_LANE

struct uct_cuda_ipc_lane_memh {
    uintptr_t       start;
    uintptr_t       end;
    ucs_list_link_t exports; /* One for each range that was packed: as a rule one */
};


/* An export with a place of its own. */
typedef struct {
    ucs_list_link_t   list;
    cuda_ipc_export_t export;
} uct_cuda_ipc_lane_export_t;


struct uct_cuda_ipc_lane_memh *
uct_cuda_ipc_lane_mem_reg(void *address, size_t length)
{
    struct uct_cuda_ipc_lane_memh *lane;

    if (!uct_cuda_ipc_lane_is_on()) {
        return NULL;
    }

    lane = ucs_malloc(sizeof(*lane), "uct_cuda_ipc_lane_memh");
    if (lane == NULL) {
        return NULL;
    }

    lane->start = (uintptr_t)address;
    lane->end   = lane->start + length;
    ucs_list_head_init(&lane->exports);
    return lane;
}

/* What the driver says of an address. */
typedef struct {
    int                is_legacy;
    uint64_t           handle_types;
    unsigned long long buffer_id;
    int                device;
    uintptr_t          chunk_end; /* Of the physical allocation there */
} uct_cuda_ipc_lane_memory_t;

static int uct_cuda_ipc_lane_query(CUdeviceptr address,
                                   uct_cuda_ipc_lane_memory_t *memory)
{
    CUpointer_attribute types[] = {
        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
        CU_POINTER_ATTRIBUTE_BUFFER_ID,
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    };
    void *values[]              = {
        &memory->is_legacy,
        &memory->handle_types,
        &memory->buffer_id,
        &memory->device
    };
    CUdeviceptr base;
    size_t size;

    memory->is_legacy    = 0;
    memory->handle_types = 0;
    memory->buffer_id    = 0;
    memory->device       = CU_DEVICE_INVALID;
    if ((UCT_CUDADRV_FUNC(cuPointerGetAttributes(ucs_static_array_size(types),
                                                 types, values, address),
                          UCS_LOG_LEVEL_DEBUG) != UCS_OK) ||
        memory->is_legacy ||
        !(memory->handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) ||
        (memory->device < 0)) {
        return 0;
    }

    if (UCT_CUDADRV_FUNC(cuMemGetAddressRange(&base, &size, address),
                         UCS_LOG_LEVEL_DEBUG) != UCS_OK) {
        return 0;
    }

    memory->chunk_end = base + size;
    return 1;
}

/* Exports a range for a registration; whether that gave a payload of the lane's. */
static int uct_cuda_ipc_lane_export(struct uct_cuda_ipc_lane_memh *lane,
                                    uintptr_t start, uintptr_t end,
                                    void *payload)
{
    const cuda_ipc_context_t context = uct_cuda_ipc_lane_context();
    uint32_t handle_type             = CUDA_IPC_TYPE_NO_IPC;
    uct_cuda_ipc_lane_export_t *export;
    cuda_ipc_status_t status;

    if (context.id == 0) {
        return 0;
    }

    export = ucs_malloc(sizeof(*export), "uct_cuda_ipc_lane_export");
    if (export == NULL) {
        return 0;
    }

    status = cuda_ipc_export(context, start, end - start, &export->export);
    if (status != CUDA_IPC_OK) {
        ucs_debug("no export of 0x%lx..0x%lx: %s", start, end,
                  cuda_ipc_status_string(status));
        goto err_free;
    }

    status = cuda_ipc_export_payload(export->export, payload,
                                     CUDA_IPC_PAYLOAD_LEN, &handle_type);
    if ((status != CUDA_IPC_OK) || (handle_type != CUDA_IPC_TYPE_POSIX)) {
        ucs_debug("export of 0x%lx..0x%lx has type %u", start, end,
                  handle_type);
        goto err_release;
    }

    ucs_list_add_tail(&lane->exports, &export->list);
    return 1;

err_release:
    cuda_ipc_export_release(export->export);
err_free:
    ucs_free(export);
    return 0;
}

ucs_status_t
uct_cuda_ipc_lane_mem_add_reg(void *address, size_t length,
                              uct_cuda_ipc_memh_t *memh,
                              uct_cuda_ipc_lkey_t **key_p)
{
    struct uct_cuda_ipc_lane_memh *lane = memh->lane;
    uintptr_t start                     = (uintptr_t)address;
    uintptr_t end                       = start + length;
    uct_cuda_ipc_lane_memory_t memory;
    uct_cuda_ipc_lkey_t *key;

    if (lane == NULL) {
        return UCS_ERR_UNSUPPORTED;
    }

    ucs_list_for_each(key, &memh->list, link) {
        if ((start >= key->d_bptr) && (end <= key->d_bptr + key->b_len)) {
            *key_p = key;
            return UCS_OK;
        }
    }

    /* UCP registers the physical allocation at an address where that is all it was told of, and packs what the user has registered. The key is for both. */
    if ((start <= lane->end) && (lane->start <= end)) {
        start = ucs_min(start, lane->start);
        end   = ucs_max(end, lane->end);
    }

    if (!uct_cuda_ipc_lane_query(start, &memory)) {
        return UCS_ERR_UNSUPPORTED;
    }

    /* A fabric handle reaches other nodes too, but covers one physical allocation only. */
    if ((memory.handle_types &
         ~(uint64_t)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) &&
        (end <= memory.chunk_end)) {
        return UCS_ERR_UNSUPPORTED;
    }

    key = ucs_calloc(1, sizeof(*key), "uct_cuda_ipc_lkey_t");
    if (key == NULL) {
        return UCS_ERR_UNSUPPORTED;
    }

    if (uct_cuda_ipc_lane_export(lane, start, end, &key->ph.handle)) {
        key->ph.handle_type =
                (uct_cuda_ipc_key_handle_t)UCT_CUDA_IPC_LANE_HANDLE_TYPE;
    } else if (end > memory.chunk_end) {
        /* UCX's own handles would cover the first physical allocation, and transfers beyond it would fail. */
        memset(&key->ph, 0, sizeof(key->ph));
        key->ph.handle_type = UCT_CUDA_IPC_KEY_HANDLE_TYPE_NO_IPC;
    } else {
        ucs_free(key);
        return UCS_ERR_UNSUPPORTED;
    }

    key->d_bptr       = start;
    key->b_len        = end - start;
    key->ph.buffer_id = memory.buffer_id;
    memh->dev_num     = memory.device;
    ucs_list_add_tail(&memh->list, &key->link);
    ucs_trace("registered 0x%lx..0x%lx for POSIX file descriptors: type 0x%x",
              start, end, key->ph.handle_type);
    *key_p = key;
    return UCS_OK;
}

void uct_cuda_ipc_lane_mem_dereg(uct_cuda_ipc_memh_t *memh)
{
    uct_cuda_ipc_lane_export_t *export, *tmp;

    if (memh->lane == NULL) {
        return;
    }

    ucs_list_for_each_safe(export, tmp, &memh->lane->exports, list) {
        cuda_ipc_export_release(export->export);
        ucs_free(export);
    }
    ucs_free(memh->lane);
}

#endif /* HAVE_CUDA_IPC_LANE */
