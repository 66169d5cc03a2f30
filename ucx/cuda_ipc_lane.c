/*
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The cuda-ipc lane in UCX's cuda_ipc transport: maps registrations, rkeys and transfers onto libcuda_ipc.
 *
 * Owns one context of libcuda_ipc for the process, from its first use to the close of the last md. Exports belong to registrations, windows to unpacked
 * rkeys, leases to transfers. Mappings of the lane are libcuda_ipc's: UCX's cache of regions never sees them. No lock is held across a call into libcuda_ipc,
 * but when the context is made and ended, and an rkey's own while its pointer is made. Longer than other files here, so that a UCX tree has one more source only.
 */

#ifdef HAVE_CONFIG_H
#  include "config.h"
#endif

#include "cuda_ipc_lane.inl"

#include <ucm/api/ucm.h>
#include <ucs/arch/cpu.h>
#include <ucs/debug/log.h>
#include <ucs/debug/memtrack_int.h>
#include <ucs/sys/math.h>
#include <ucs/type/spinlock.h>

#include <pthread.h>
#include <string.h>


const char *uct_cuda_ipc_lane_route_names[] = {"auto", "pidfd", "broker", NULL};


#if HAVE_CUDA_IPC_LANE

#include <cuda_ipc.h>

/* How long a call may wait for another process, in nanoseconds: also the longest that a transfer can hold the progress up. */
#define UCT_CUDA_IPC_LANE_TIMEOUT_NS (10ull * 1000 * 1000 * 1000)

/* How long it is taken for granted that such a call waits for nobody's work but that of others. */
#define UCT_CUDA_IPC_LANE_PATIENCE_NS (100ull * 1000 * 1000)

/* First bytes of a payload. */
#define UCT_CUDA_IPC_LANE_MAGIC "CIPC"

/* Before the handlers that take registrations down. */
#define UCT_CUDA_IPC_LANE_EVENT_PRIORITY 500

/* Text of the last error of this thread, for a log line. */
#define uct_cuda_ipc_lane_error_text() \
    ({ \
        cuda_ipc_error_t *_error = ucs_alloca(sizeof(cuda_ipc_error_t)); \
        memset(_error, 0, sizeof(*_error)); \
        _error->size = sizeof(*_error); \
        (cuda_ipc_last_error(_error) == CUDA_IPC_OK) ? _error->text : \
                                                       "no text"; \
    })


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


/* A lease and what is known of the work that uses it. Taken and given back by a shard, whose lock its fields have. */
typedef struct {
    ucs_list_link_t  list;  /* In `taken` or `unused` of the shard */
    ucs_list_link_t  held;  /* In `held` of an rkey, if it ends with that */
    unsigned         shard;
    cuda_ipc_lease_t lease; /* id 0: not leased yet, or ended already */
    CUevent          event; /* Of the copy that uses it; NULL if none was submitted */
    CUcontext        ctx;   /* That this was submitted in */
} uct_cuda_ipc_lane_lease_t;


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


static struct {
    pthread_mutex_t            lock;
    unsigned                   mds;     /* That are open */
    uct_cuda_ipc_lane_config_t config;
    int                        failed;  /* There is no context, and will be none */
    /* id 0 if none. Written under `lock`, read without it. */
    volatile uint64_t          context;
} uct_cuda_ipc_lane = {
    .lock    = PTHREAD_MUTEX_INITIALIZER,
    .config  = {.posix_fd = UCS_NO},
    .context = 0
};


static void uct_cuda_ipc_lane_log(int32_t level, const char *line, void *user)
{
    switch (level) {
    case CUDA_IPC_LOG_ERROR:
        ucs_error("%s", line);
        break;
    case CUDA_IPC_LOG_WARN:
        ucs_warn("%s", line);
        break;
    case CUDA_IPC_LOG_INFO:
        ucs_info("%s", line);
        break;
    default:
        ucs_debug("%s", line);
        break;
    }
}

static int32_t uct_cuda_ipc_lane_log_level(void)
{
    if (ucs_log_is_enabled(UCS_LOG_LEVEL_DEBUG)) {
        return CUDA_IPC_LOG_DEBUG;
    }

    return ucs_log_is_enabled(UCS_LOG_LEVEL_INFO) ? CUDA_IPC_LOG_INFO :
                                                    CUDA_IPC_LOG_WARN;
}

/* Memory is about to be freed: importers are told before it is. Called from inside the driver, where no driver call may be made, and none is. */
static void uct_cuda_ipc_lane_mem_free_event(ucm_event_type_t event_type,
                                             ucm_event_t *event, void *arg)
{
    const cuda_ipc_context_t context = {uct_cuda_ipc_lane.context};

    if (context.id != 0) {
        cuda_ipc_retire(context, (uintptr_t)event->mem_type.address,
                        event->mem_type.size, NULL);
    }
}

int uct_cuda_ipc_lane_is_on(void)
{
    return uct_cuda_ipc_lane.config.posix_fd != UCS_NO;
}

/* Called with the lock. */
static void uct_cuda_ipc_lane_make_context(void)
{
    cuda_ipc_context_t context = {0};
    cuda_ipc_config_t config;
    cuda_ipc_status_t status;

    status = cuda_ipc_config_init(&config, sizeof(config));
    if (status == CUDA_IPC_OK) {
        config.log       = uct_cuda_ipc_lane_log;
        config.log_level = uct_cuda_ipc_lane_log_level();
        /* Names and numbers are in the same order; "auto" leaves the choice to CUDA_IPC_ROUTE. */
        config.route     = (uct_cuda_ipc_lane.config.route == 0) ?
                                   0 :
                                   (CUDA_IPC_ROUTE_AUTO +
                                    uct_cuda_ipc_lane.config.route);
        status           = cuda_ipc_context_create(&config, &context);
    }

    if (status != CUDA_IPC_OK) {
        uct_cuda_ipc_lane.failed = 1;
        ucs_log((uct_cuda_ipc_lane.config.posix_fd == UCS_YES) ?
                        UCS_LOG_LEVEL_ERROR :
                        UCS_LOG_LEVEL_DIAG,
                "memory cannot be shared by POSIX file descriptors: %s",
                uct_cuda_ipc_lane_error_text());
        return;
    }

    if (ucm_set_event_handler(UCM_EVENT_MEM_TYPE_FREE |
                                      UCM_EVENT_FLAG_NO_INSTALL,
                              UCT_CUDA_IPC_LANE_EVENT_PRIORITY,
                              uct_cuda_ipc_lane_mem_free_event,
                              NULL) != UCS_OK) {
        /* Then the library finds it out by itself, later. */
        ucs_debug("no events of freed memory for libcuda_ipc");
    }

    uct_cuda_ipc_lane.context = context.id;
    ucs_debug("libcuda_ipc %s", cuda_ipc_version_string());
}

/* The context, made now if it was not needed before; id 0 if there is none. */
static cuda_ipc_context_t uct_cuda_ipc_lane_context(void)
{
    cuda_ipc_context_t context = {uct_cuda_ipc_lane.context};

    if (ucs_likely(context.id != 0) || !uct_cuda_ipc_lane_is_on()) {
        return context;
    }

    pthread_mutex_lock(&uct_cuda_ipc_lane.lock);
    if ((uct_cuda_ipc_lane.context == 0) && !uct_cuda_ipc_lane.failed &&
        (uct_cuda_ipc_lane.mds > 0)) {
        uct_cuda_ipc_lane_make_context();
    }
    context.id = uct_cuda_ipc_lane.context;
    pthread_mutex_unlock(&uct_cuda_ipc_lane.lock);
    return context;
}

void uct_cuda_ipc_lane_open(const uct_cuda_ipc_lane_config_t *config)
{
    pthread_mutex_lock(&uct_cuda_ipc_lane.lock);
    if (uct_cuda_ipc_lane.mds++ == 0) {
        uct_cuda_ipc_lane.config = *config;
        uct_cuda_ipc_lane.failed = 0;
    } else if ((uct_cuda_ipc_lane.config.posix_fd != config->posix_fd) ||
               (uct_cuda_ipc_lane.config.route != config->route)) {
        ucs_warn("UCX_CUDA_IPC_POSIX_FD and UCX_CUDA_IPC_POSIX_FD_ROUTE are as "
                 "the first open memory domain has set them");
    }

    if ((uct_cuda_ipc_lane.config.posix_fd == UCS_YES) &&
        (uct_cuda_ipc_lane.context == 0) && !uct_cuda_ipc_lane.failed) {
        uct_cuda_ipc_lane_make_context();
    }
    pthread_mutex_unlock(&uct_cuda_ipc_lane.lock);
}

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

/* A place for a lease, in the list of taken ones; NULL without memory. */
static uct_cuda_ipc_lane_lease_t *uct_cuda_ipc_lane_lease_get(void)
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

/* Ends a lease, if it has not ended, and gives its place back. */
static void uct_cuda_ipc_lane_lease_put(uct_cuda_ipc_lane_lease_t *lease)
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
static cuda_ipc_status_t
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

        /* It is found out at once that it waits for leases of the same window handle; for others, after some time. */
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

/* Ends what UCX has left: transfers that were running when their interface was closed. Nobody waits for these any more but this. */
static void uct_cuda_ipc_lane_end_all(void)
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

/* Frees the places of leases that nobody has. */
static void uct_cuda_ipc_lane_free_unused(void)
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

void uct_cuda_ipc_lane_close(void)
{
    cuda_ipc_context_t context;

    pthread_mutex_lock(&uct_cuda_ipc_lane.lock);
    if (--uct_cuda_ipc_lane.mds == 0) {
        context.id                = uct_cuda_ipc_lane.context;
        uct_cuda_ipc_lane.context = 0;
        if (context.id != 0) {
            uct_cuda_ipc_lane_end_all();
            uct_cuda_ipc_lane_free_unused();
            ucm_unset_event_handler(UCM_EVENT_MEM_TYPE_FREE,
                                    uct_cuda_ipc_lane_mem_free_event, NULL);
            cuda_ipc_context_destroy(context);
        }
    }
    pthread_mutex_unlock(&uct_cuda_ipc_lane.lock);
}

#endif /* HAVE_CUDA_IPC_LANE */
