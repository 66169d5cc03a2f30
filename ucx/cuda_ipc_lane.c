/*
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The cuda-ipc lane in UCX's cuda_ipc transport: its settings, and its context of libcuda_ipc.
 *
 * Owns one context for the process, from its first use to the close of the last md, what it logs, and the event of freed memory. Registrations are in
 * cuda_ipc_lane_export.c, rkeys and transfers in cuda_ipc_lane_import.c, the leases of transfers in cuda_ipc_lane_lease.c. No lock is held across a call into
 * libcuda_ipc, but when the context is made and ended, and an rkey's own while its pointer is made.
 */

#ifdef HAVE_CONFIG_H
#  include "config.h"
#endif

#include "cuda_ipc_lane_int.h"

#include <ucm/api/ucm.h>
#include <ucs/debug/log.h>

#include <pthread.h>


const char *uct_cuda_ipc_lane_route_names[] = {"auto", "pidfd", "broker", NULL};


#if HAVE_CUDA_IPC_LANE

/* Before the handlers that take registrations down. */
#define UCT_CUDA_IPC_LANE_EVENT_PRIORITY 500


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

cuda_ipc_context_t uct_cuda_ipc_lane_context(void)
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

void uct_cuda_ipc_lane_close(void)
{
    cuda_ipc_context_t context;

    pthread_mutex_lock(&uct_cuda_ipc_lane.lock);
    if (--uct_cuda_ipc_lane.mds == 0) {
        context.id                = uct_cuda_ipc_lane.context;
        uct_cuda_ipc_lane.context = 0;
        if (context.id != 0) {
            uct_cuda_ipc_lane_leases_end();
            uct_cuda_ipc_lane_leases_cleanup();
            ucm_unset_event_handler(UCM_EVENT_MEM_TYPE_FREE,
                                    uct_cuda_ipc_lane_mem_free_event, NULL);
            cuda_ipc_context_destroy(context);
        }
    }
    pthread_mutex_unlock(&uct_cuda_ipc_lane.lock);
}

#endif /* HAVE_CUDA_IPC_LANE */
