/*
 * Everything that a C caller can do wrong without lying about pointers: each is an error code, none a crash, and what was right before works afterwards.
 *
 *     misuse SOCKET      with the example exporter at the socket
 */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif

#include "common.h"
#include "driver.h"

#include <pthread.h>
#include <sys/wait.h>

#define PATIENCE ((uint64_t)20 * 1000 * 1000 * 1000)
#define CHUNK ((size_t)2 << 20)

static unsigned long checks;

/* Whatever this process's fake driver has counted; the fake's control.rs says what stands where. */
extern int fake_cuda_counters(uint64_t *counters, size_t size);
#define COUNTERS 13
#define CALLS 7
#define CALLS_AFTER_FORK 8

static uint64_t counter(int which)
{
    uint64_t counters[COUNTERS];

    memset(counters, 0, sizeof(counters));
    if (fake_cuda_counters(counters, sizeof(counters)) != 0) {
        fprintf(stderr, "the fake driver's counters have another size\n");
        exit(1);
    }
    return counters[which];
}

static void expect_one(cuda_ipc_status_t found, cuda_ipc_status_t expected, const char *what, int line)
{
    checks++;
    if (found != expected) {
        fprintf(stderr, "line %d: %s: %d (%s) instead of %d (%s)\n", line, what, (int)found, cuda_ipc_status_string(found), (int)expected,
                cuda_ipc_status_string(expected));
        exit(1);
    }
}

#define EXPECT(expected, call) expect_one((call), (expected), #call, __LINE__)
#define ASSERT(what) expect_one((what) ? 0 : 1, 0, #what, __LINE__)

static unsigned char rkey[CUDA_IPC_RKEY_LEN];
static CUdeviceptr own;
static cuda_ipc_context_t context;
static cuda_ipc_export_t shared;
static cuda_ipc_window_t window;
static cuda_ipc_window_info_t window_facts;

static cuda_ipc_context_t context_of(uint64_t id) { cuda_ipc_context_t handle; handle.id = id; return handle; }
static cuda_ipc_export_t export_of(uint64_t id) { cuda_ipc_export_t handle; handle.id = id; return handle; }
static cuda_ipc_window_t window_of(uint64_t id) { cuda_ipc_window_t handle; handle.id = id; return handle; }
static cuda_ipc_lease_t lease_of(uint64_t id) { cuda_ipc_lease_t handle; handle.id = id; return handle; }

static void set_up(const char *path)
{
    CUmemAllocationProp properties;
    CUmemAccessDesc access;
    CUmemGenericAllocationHandle handle;

    /* The socket stays open until this process ends, and with it the exporter. */
    (void)receive_rkey(path, rkey);
    open_driver();
    memset(&properties, 0, sizeof(properties));
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CUDA(cuMemAddressReserve(&own, 4 * CHUNK, 0, 0, 0));
    CUDA(cuMemCreate(&handle, CHUNK, &properties, 0));
    CUDA(cuMemMap(own, CHUNK, 0, handle, 0));
    CUDA(cuMemRelease(handle));
    CUDA(cuMemSetAccess(own, CHUNK, &access, 1));

    EXPECT(CUDA_IPC_OK, cuda_ipc_context_create(NULL, &context));
    EXPECT(CUDA_IPC_OK, cuda_ipc_export(context, own, CHUNK, &shared));
    EXPECT(CUDA_IPC_OK, cuda_ipc_import(context, rkey, sizeof(rkey), NULL, PATIENCE, &window));
    window_facts.size = sizeof(window_facts);
    EXPECT(CUDA_IPC_OK, cuda_ipc_window_info(window, &window_facts));
    ASSERT(window_facts.own_process == 0 && window_facts.pid != 0 && window_facts.route == CUDA_IPC_ROUTE_PIDFD);
}

/* Reads the exporter's memory through a lease and compares it. */
static void verify(void)
{
    unsigned char bytes[4096];
    cuda_ipc_lease_t lease;
    uint64_t local;
    size_t at;

    EXPECT(CUDA_IPC_OK, cuda_ipc_lease(window, window_facts.base + CHUNK, sizeof(bytes), PATIENCE, &lease, &local));
    CUDA(cuMemcpyDtoH_v2(bytes, local, sizeof(bytes)));
    for (at = 0; at < sizeof(bytes); at++) {
        if (bytes[at] != pattern(CHUNK + at)) {
            fprintf(stderr, "wrong byte at %zu\n", at);
            exit(1);
        }
    }
    EXPECT(CUDA_IPC_OK, cuda_ipc_lease_end(lease));
}

/* Each pointer that must not be null, null; each handle 0. */
static void nulls(void)
{
    cuda_ipc_context_t no_context = context_of(0), made;
    cuda_ipc_export_t no_export = export_of(0), exported;
    cuda_ipc_window_t no_window = window_of(0), opened;
    cuda_ipc_lease_t no_lease = lease_of(0), leased;
    cuda_ipc_export_info_t export_info;
    cuda_ipc_window_info_t info;
    cuda_ipc_probe_t probe;
    cuda_ipc_stats_t stats;
    unsigned char bytes[CUDA_IPC_RKEY_LEN];
    char text[512];
    size_t length;
    uint64_t number;
    uint32_t type;

    memset(&made, 0, sizeof(made));
    export_info.size = sizeof(export_info);
    info.size = sizeof(info);
    probe.size = sizeof(probe);
    stats.size = sizeof(stats);
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_config_init(NULL, sizeof(cuda_ipc_config_t)));
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_context_create(NULL, NULL));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_context_destroy(no_context));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_retire(no_context, own, CHUNK, NULL));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_sweep(no_context, NULL));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_trim(no_context, NULL));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_purge_peer(no_context, 1, NULL));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_export(no_context, own, CHUNK, &exported));
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_export(context, own, CHUNK, NULL));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_export_info(no_export, &export_info));
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_export_info(shared, NULL));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_export_payload(no_export, bytes, sizeof(bytes), &type));
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_export_payload(shared, NULL, sizeof(bytes), &type));
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_export_payload(shared, bytes, sizeof(bytes), NULL));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_export_rkey(no_export, bytes, sizeof(bytes), &length));
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_export_rkey(shared, bytes, sizeof(bytes), NULL));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_export_release(no_export));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_import(no_context, rkey, sizeof(rkey), NULL, PATIENCE, &opened));
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_import(context, NULL, sizeof(rkey), NULL, PATIENCE, &opened));
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_import(context, rkey, sizeof(rkey), NULL, PATIENCE, NULL));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_import_payload(no_context, 0, rkey, 64, own, CHUNK, NULL, PATIENCE, &opened));
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_import_payload(context, 0, NULL, 64, own, CHUNK, NULL, PATIENCE, &opened));
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_import_payload(context, 0, rkey, 64, own, CHUNK, NULL, PATIENCE, NULL));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_window_info(no_window, &info));
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_window_info(window, NULL));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_window_release(no_window));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_lease(no_window, window_facts.base, 1, PATIENCE, &leased, &number));
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_lease(window, window_facts.base, 1, PATIENCE, NULL, &number));
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_lease(window, window_facts.base, 1, PATIENCE, &leased, NULL));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_lease_holding(no_window, window_facts.base, 1, PATIENCE, NULL, 0, &leased, &number));
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_lease_holding(window, window_facts.base, 1, PATIENCE, NULL, 1, &leased, &number));
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_lease_holding(window, window_facts.base, 1, PATIENCE, NULL, 0, NULL, &number));
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_lease_holding(window, window_facts.base, 1, PATIENCE, NULL, 0, &leased, NULL));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_lease_end(no_lease));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_probe(no_context, own, &probe));
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_probe(context, own, NULL));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_probe_text(no_context, own, text, sizeof(text), &length));
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_probe_text(context, own, NULL, 0, NULL));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_stats(no_context, &stats));
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_stats(context, NULL));
    EXPECT(CUDA_IPC_ERR_NULL, cuda_ipc_last_error(NULL));

    /* What may be null. */
    EXPECT(CUDA_IPC_OK, cuda_ipc_retire(context, own + CHUNK, CHUNK, NULL));
    EXPECT(CUDA_IPC_OK, cuda_ipc_sweep(context, NULL));
    EXPECT(CUDA_IPC_OK, cuda_ipc_trim(context, NULL));
    EXPECT(CUDA_IPC_OK, cuda_ipc_purge_peer(context, 12345, NULL));
    EXPECT(CUDA_IPC_OK, cuda_ipc_export_rkey(shared, NULL, 0, &length));
    ASSERT(length == CUDA_IPC_RKEY_LEN);
    EXPECT(CUDA_IPC_OK, cuda_ipc_probe_text(context, own, NULL, 0, &length));
    ASSERT(length > 40);
    ASSERT(cuda_ipc_status_string(123456) != NULL && cuda_ipc_version() >= 1000 && cuda_ipc_version_string()[0] != 0);
    ASSERT(cuda_ipc_status_is_retryable(CUDA_IPC_WOULD_BLOCK) == 1 && cuda_ipc_status_is_retryable(CUDA_IPC_OK) == 0);
}

/* Structures of every size, in memory that ends where they do: a library that writes past them is caught by ASan. */
#define SIZES(type, reads, call)                                                                                       \
    do {                                                                                                               \
        static const size_t wrong[] = {0, 1, 7, sizeof(type) - 1, 4097, (size_t)-1};                                   \
        type *object;                                                                                                  \
        unsigned char *larger = (unsigned char *)calloc(1, sizeof(type) + 24);                                         \
        size_t at;                                                                                                     \
        for (at = 0; at < sizeof(wrong) / sizeof(wrong[0]); at++) {                                                    \
            object = (type *)calloc(1, sizeof(type));                                                                  \
            ASSERT(object != NULL);                                                                                    \
            object->size = wrong[at];                                                                                  \
            EXPECT(CUDA_IPC_ERR_STRUCT_SIZE, call);                                                                    \
            free(object);                                                                                              \
        }                                                                                                              \
        object = (type *)calloc(1, sizeof(type));                                                                      \
        ASSERT(object != NULL && larger != NULL);                                                                      \
        object->size = sizeof(type);                                                                                   \
        EXPECT(CUDA_IPC_OK, call);                                                                                     \
        ASSERT(object->size == sizeof(type));                                                                          \
        free(object);                                                                                                  \
        /* A later version's structure. */                                                                             \
        object = (type *)(void *)larger;                                                                               \
        object->size = sizeof(type) + 24;                                                                              \
        EXPECT(CUDA_IPC_OK, call);                                                                                     \
        object->size = sizeof(type) + 24;                                                                              \
        larger[sizeof(type) + 20] = 1;                                                                                 \
        EXPECT((reads) ? CUDA_IPC_ERR_STRUCT_SIZE : CUDA_IPC_OK, call);                                                \
        ASSERT((reads) || (object->size == sizeof(type) && larger[sizeof(type) + 20] == 1));                           \
        free(larger);                                                                                                  \
    } while (0)

static cuda_ipc_status_t create_and_destroy(const cuda_ipc_config_t *config)
{
    cuda_ipc_context_t made;
    cuda_ipc_status_t status = cuda_ipc_context_create(config, &made);

    if (status == CUDA_IPC_OK) {
        EXPECT(CUDA_IPC_OK, cuda_ipc_context_destroy(made));
    }
    return status;
}

static cuda_ipc_status_t import_and_release(const cuda_ipc_import_options_t *options)
{
    cuda_ipc_window_t opened;
    cuda_ipc_status_t status = cuda_ipc_import(context, rkey, sizeof(rkey), options, PATIENCE, &opened);

    if (status == CUDA_IPC_OK) {
        EXPECT(CUDA_IPC_OK, cuda_ipc_window_release(opened));
    }
    return status;
}

static void sizes(void)
{
    cuda_ipc_config_t config;
    unsigned char bytes[CUDA_IPC_RKEY_LEN];
    char *text;
    size_t length;
    uint32_t type;

    SIZES(cuda_ipc_config_t, 1, create_and_destroy(object));
    SIZES(cuda_ipc_import_options_t, 1, import_and_release(object));
    SIZES(cuda_ipc_export_info_t, 0, cuda_ipc_export_info(shared, object));
    SIZES(cuda_ipc_window_info_t, 0, cuda_ipc_window_info(window, object));
    SIZES(cuda_ipc_probe_t, 0, cuda_ipc_probe(context, own, object));
    SIZES(cuda_ipc_stats_t, 0, cuda_ipc_stats(context, object));
    SIZES(cuda_ipc_error_t, 0, cuda_ipc_last_error(object));
    EXPECT(CUDA_IPC_ERR_STRUCT_SIZE, cuda_ipc_config_init(&config, 0));
    EXPECT(CUDA_IPC_ERR_STRUCT_SIZE, cuda_ipc_config_init(&config, 100000));

    EXPECT(CUDA_IPC_ERR_BUFFER, cuda_ipc_export_rkey(shared, bytes, CUDA_IPC_RKEY_LEN - 1, &length));
    ASSERT(length == CUDA_IPC_RKEY_LEN);
    EXPECT(CUDA_IPC_ERR_BUFFER, cuda_ipc_export_payload(shared, bytes, CUDA_IPC_PAYLOAD_LEN - 1, &type));
    EXPECT(CUDA_IPC_OK, cuda_ipc_probe_text(context, own, NULL, 0, &length));
    text = (char *)malloc(length + 1);
    ASSERT(text != NULL);
    EXPECT(CUDA_IPC_ERR_BUFFER, cuda_ipc_probe_text(context, own, text, length, NULL));
    EXPECT(CUDA_IPC_OK, cuda_ipc_probe_text(context, own, text, length + 1, NULL));
    ASSERT(strlen(text) == length && strstr(text, "can be shared") != NULL);
    free(text);
}

/* Arguments that mean nothing. */
static void arguments(void)
{
    cuda_ipc_import_options_t options;
    cuda_ipc_config_t config;
    cuda_ipc_export_t exported;
    cuda_ipc_window_t opened;
    cuda_ipc_lease_t leased;
    unsigned char damaged[CUDA_IPC_RKEY_LEN];
    uint64_t local;
    size_t at;

    EXPECT(CUDA_IPC_ERR_RANGE, cuda_ipc_export(context, own, 0, &exported));
    EXPECT(CUDA_IPC_ERR_RANGE, cuda_ipc_export(context, own, UINT64_MAX, &exported));
    EXPECT(CUDA_IPC_ERR_RANGE, cuda_ipc_retire(context, own, 0, NULL));
    EXPECT(CUDA_IPC_ERR_RANGE, cuda_ipc_lease(window, window_facts.base, 0, PATIENCE, &leased, &local));
    EXPECT(CUDA_IPC_ERR_RANGE, cuda_ipc_lease(window, window_facts.base - 1, 1, PATIENCE, &leased, &local));
    EXPECT(CUDA_IPC_ERR_RANGE, cuda_ipc_lease(window, window_facts.base, UINT64_MAX, PATIENCE, &leased, &local));
    EXPECT(CUDA_IPC_WOULD_BLOCK, cuda_ipc_lease(window, window_facts.base, UINT64_MAX, 0, &leased, &local));
    EXPECT(CUDA_IPC_ERR_ARGUMENT, cuda_ipc_lease_holding(window, window_facts.base, 1, PATIENCE, &leased, 1000000, &leased, &local));

    memset(&options, 0, sizeof(options));
    options.size = sizeof(options);
    options.flags = 0x80;
    EXPECT(CUDA_IPC_ERR_ARGUMENT, import_and_release(&options));
    options.flags = 0;
    options.device = 99;
    EXPECT(CUDA_IPC_ERR_ARGUMENT, import_and_release(&options));
    options.device = -1;
    EXPECT(CUDA_IPC_ERR_ARGUMENT, import_and_release(&options));
    EXPECT(CUDA_IPC_OK, cuda_ipc_config_init(&config, sizeof(config)));
    config.route = 77;
    EXPECT(CUDA_IPC_ERR_ARGUMENT, create_and_destroy(&config));
    EXPECT(CUDA_IPC_OK, cuda_ipc_config_init(&config, sizeof(config)));
    config.allowed_uid_count = 3;
    EXPECT(CUDA_IPC_ERR_NULL, create_and_destroy(&config));
    config.allowed_uid_count = (size_t)-1;
    EXPECT(CUDA_IPC_ERR_NULL, create_and_destroy(&config));

    /* Every byte of a key, changed; every length but the right one. */
    for (at = 0; at < sizeof(rkey); at++) {
        cuda_ipc_status_t status;

        memcpy(damaged, rkey, sizeof(rkey));
        damaged[at] ^= 0x40;
        status = cuda_ipc_import(context, damaged, sizeof(damaged), NULL, PATIENCE, &opened);
        ASSERT(status == CUDA_IPC_ERR_KEY || (at == 4 && status == CUDA_IPC_ERR_KEY_VERSION));
        EXPECT(CUDA_IPC_ERR_KEY, cuda_ipc_import(context, rkey, at, NULL, PATIENCE, &opened));
    }
    EXPECT(CUDA_IPC_ERR_HANDLE_TYPE, cuda_ipc_import_payload(context, 99, rkey, 64, own, CHUNK, NULL, PATIENCE, &opened));
    EXPECT(CUDA_IPC_ERR_NO_IPC, cuda_ipc_import_payload(context, CUDA_IPC_TYPE_NO_IPC, rkey, 64, own, CHUNK, NULL, PATIENCE, &opened));
    EXPECT(CUDA_IPC_ERR_KEY, cuda_ipc_import_payload(context, CUDA_IPC_TYPE_POSIX, rkey, 64, own, CHUNK, NULL, PATIENCE, &opened));
    EXPECT(CUDA_IPC_ERR_KEY, cuda_ipc_import_payload(context, CUDA_IPC_TYPE_LEGACY, rkey, 63, own, CHUNK, NULL, PATIENCE, &opened));
}

/* Double releases, and handles of what is gone. */
static void stale(void)
{
    cuda_ipc_context_t other;
    cuda_ipc_export_t exported, no_ipc;
    cuda_ipc_window_t opened, again;
    cuda_ipc_lease_t first, second;
    cuda_ipc_export_info_t export_info;
    cuda_ipc_window_info_t info;
    cuda_ipc_stats_t stats;
    unsigned char bytes[4096], key[CUDA_IPC_RKEY_LEN];
    uint64_t local, elsewhere;
    size_t length, at;
    int host = 0;

    stats.size = sizeof(stats);
    export_info.size = sizeof(export_info);
    info.size = sizeof(info);
    EXPECT(CUDA_IPC_OK, cuda_ipc_context_create(NULL, &other));
    EXPECT(CUDA_IPC_OK, cuda_ipc_export(other, own, CHUNK, &exported));
    EXPECT(CUDA_IPC_OK, cuda_ipc_export_rkey(exported, key, sizeof(key), &length));
    EXPECT(CUDA_IPC_OK, cuda_ipc_import(other, rkey, sizeof(rkey), NULL, PATIENCE, &opened));
    EXPECT(CUDA_IPC_OK, cuda_ipc_import(other, rkey, sizeof(rkey), NULL, PATIENCE, &again));

    /* A lease ends once, and its window's release does not end it. */
    EXPECT(CUDA_IPC_OK, cuda_ipc_lease(opened, window_facts.base, 4096, PATIENCE, &first, &local));
    EXPECT(CUDA_IPC_OK, cuda_ipc_lease_holding(opened, window_facts.base, 4096, PATIENCE, &first, 1, &second, &elsewhere));
    ASSERT(local == elsewhere && first.id != second.id);
    EXPECT(CUDA_IPC_OK, cuda_ipc_lease_end(first));
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_lease_end(first));
    EXPECT(CUDA_IPC_OK, cuda_ipc_window_release(opened));
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_window_release(opened));
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_lease(opened, window_facts.base, 1, PATIENCE, &first, &local));
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_lease_holding(opened, window_facts.base, 1, PATIENCE, NULL, 0, &first, &local));
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_window_info(opened, &info));
    EXPECT(CUDA_IPC_OK, cuda_ipc_stats(other, &stats));
    ASSERT(stats.windows == 1 && stats.closing_windows == 1 && stats.exports == 1);

    /* Nor does the end of the context. */
    EXPECT(CUDA_IPC_OK, cuda_ipc_context_destroy(other));
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_context_destroy(other));
    CUDA(cuMemcpyDtoH_v2(bytes, elsewhere, sizeof(bytes)));
    for (at = 0; at < sizeof(bytes); at++) {
        ASSERT(bytes[at] == pattern(at));
    }
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_export(other, own, CHUNK, &no_ipc));
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_import(other, rkey, sizeof(rkey), NULL, PATIENCE, &opened));
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_retire(other, own, CHUNK, NULL));
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_sweep(other, NULL));
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_trim(other, NULL));
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_purge_peer(other, 1, NULL));
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_stats(other, &stats));
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_export_info(exported, &export_info));
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_export_rkey(exported, key, sizeof(key), &length));
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_export_release(exported));
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_window_info(again, &info));
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_window_release(again));
    EXPECT(CUDA_IPC_OK, cuda_ipc_lease_end(second));
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_lease_end(second));
    EXPECT(CUDA_IPC_OK, cuda_ipc_stats(context, &stats));
    ASSERT(stats.closing_windows == 0);

    /* One kind of handle is none of another. */
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_window_release(window_of(context.id)));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_lease_end(lease_of(window.id)));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_context_destroy(context_of(shared.id)));
    EXPECT(CUDA_IPC_ERR_HANDLE, cuda_ipc_export_release(export_of(window.id)));

    /* Memory that cannot be shared is an export all the same. */
    EXPECT(CUDA_IPC_OK, cuda_ipc_export(context, (uint64_t)(uintptr_t)&host, sizeof(host), &no_ipc));
    EXPECT(CUDA_IPC_OK, cuda_ipc_export_info(no_ipc, &export_info));
    ASSERT(export_info.handle_type == CUDA_IPC_TYPE_NO_IPC && export_info.reason == CUDA_IPC_REASON_NOT_DEVICE_MEMORY);
    EXPECT(CUDA_IPC_OK, cuda_ipc_export_rkey(no_ipc, key, sizeof(key), &length));
    EXPECT(CUDA_IPC_ERR_NO_IPC, cuda_ipc_import(context, key, length, NULL, PATIENCE, &opened));
    EXPECT(CUDA_IPC_OK, cuda_ipc_export_release(no_ipc));
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_export_release(no_ipc));
}

/* A key of this process: the memory's own address. */
static void own_key(void)
{
    cuda_ipc_window_info_t info;
    cuda_ipc_window_t mine;
    cuda_ipc_lease_t lease;
    unsigned char key[CUDA_IPC_RKEY_LEN];
    uint64_t local, calls;
    size_t length;

    EXPECT(CUDA_IPC_OK, cuda_ipc_export_rkey(shared, key, sizeof(key), &length));
    EXPECT(CUDA_IPC_OK, cuda_ipc_import(context, key, length, NULL, PATIENCE, &mine));
    info.size = sizeof(info);
    EXPECT(CUDA_IPC_OK, cuda_ipc_window_info(mine, &info));
    ASSERT(info.own_process == 1 && info.base == own && info.length == CHUNK && info.pid == (uint32_t)getpid());
    calls = counter(CALLS);
    EXPECT(CUDA_IPC_OK, cuda_ipc_lease(mine, own + 77, 100, 0, &lease, &local));
    ASSERT(local == own + 77);
    EXPECT(CUDA_IPC_ERR_RANGE, cuda_ipc_lease(mine, own - 1, 100, 0, &lease, &local));
    EXPECT(CUDA_IPC_ERR_RANGE, cuda_ipc_lease(mine, own, 0, 0, &lease, &local));
    EXPECT(CUDA_IPC_OK, cuda_ipc_lease_end(lease));
    EXPECT(CUDA_IPC_ERR_STALE_HANDLE, cuda_ipc_lease_end(lease));
    ASSERT(counter(CALLS) == calls);
    EXPECT(CUDA_IPC_OK, cuda_ipc_window_release(mine));
}

/* A handle of a kind, as the library numbers kinds, with whatever below. */
static uint64_t made_up_handle(uint64_t kind, uint64_t random)
{
    return (kind << 61) | (random & (((uint64_t)1 << 61) - 1));
}

/* Handles that nobody gave out. */
static void made_up(void)
{
    uint64_t random = 88172645463325252ull, local;
    cuda_ipc_lease_t leased;
    int round;

    ASSERT(context.id >> 61 == 1 && shared.id >> 61 == 2 && window.id >> 61 == 3);
    for (round = 0; round < 20000; round++) {
        cuda_ipc_status_t status[6];
        int at;

        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        status[0] = cuda_ipc_context_destroy(context_of(made_up_handle(1, random)));
        status[1] = cuda_ipc_export_release(export_of(made_up_handle(2, random)));
        status[2] = cuda_ipc_window_release(window_of(made_up_handle(3, random)));
        status[3] = cuda_ipc_lease(window_of(made_up_handle(3, random & 0x1fffffffff)), 0, 1, 0, &leased, &local);
        status[4] = cuda_ipc_lease_end(lease_of(made_up_handle(4, random)));
        status[5] = cuda_ipc_lease_end(lease_of(random));
        for (at = 0; at < 6; at++) {
            ASSERT(status[at] == CUDA_IPC_ERR_HANDLE || status[at] == CUDA_IPC_ERR_STALE_HANDLE);
        }
    }
}

/*
 * Threads that share all handles, release what others use and end what others hold. Whatever happens is one of the codes that the header has for it; at
 * the end nothing is held, and the memory can be read.
 */
#define THREADS 6
#define ROUNDS 3000
#define SHARED 16

static struct {
    pthread_mutex_t lock;
    uint64_t windows[SHARED], leases[SHARED], exports[SHARED];
} pool = {PTHREAD_MUTEX_INITIALIZER, {0}, {0}, {0}};

static uint64_t swap_in(uint64_t *slots, uint64_t random, uint64_t id)
{
    uint64_t before;

    pthread_mutex_lock(&pool.lock);
    before = slots[random % SHARED];
    slots[random % SHARED] = id;
    pthread_mutex_unlock(&pool.lock);
    return before;
}

static uint64_t look(uint64_t *slots, uint64_t random)
{
    uint64_t id;

    pthread_mutex_lock(&pool.lock);
    id = slots[random % SHARED];
    pthread_mutex_unlock(&pool.lock);
    return id;
}

static void allow(cuda_ipc_status_t status, cuda_ipc_status_t other, int line)
{
    if (status != CUDA_IPC_OK && status != CUDA_IPC_ERR_STALE_HANDLE && status != CUDA_IPC_ERR_HANDLE && status != other) {
        fprintf(stderr, "line %d: %d (%s)\n", line, (int)status, cuda_ipc_status_string(status));
        exit(1);
    }
}

#define ALLOW(call, other) allow((call), (other), __LINE__)

static void *play(void *seed)
{
    uint64_t random = 88172645463325252ull ^ ((uint64_t)(uintptr_t)seed * 0x9e3779b97f4a7c15ull);
    CUcontext primary;
    int round;

    CUDA(cuDevicePrimaryCtxRetain(&primary, 0));
    CUDA(cuCtxSetCurrent(primary));
    for (round = 0; round < ROUNDS; round++) {
        cuda_ipc_window_t opened;
        cuda_ipc_export_t exported;
        cuda_ipc_lease_t lease;
        cuda_ipc_window_info_t info;
        uint64_t local, at;

        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        at = random >> 20;
        switch (random % 16) {
        case 0:
            ALLOW(cuda_ipc_import(context, rkey, sizeof(rkey), NULL, PATIENCE, &opened), CUDA_IPC_OK);
            ALLOW(cuda_ipc_window_release(window_of(swap_in(pool.windows, at, opened.id))), CUDA_IPC_OK);
            break;
        case 1:
            ALLOW(cuda_ipc_window_release(window_of(look(pool.windows, at))), CUDA_IPC_OK);
            break;
        case 2:
            ALLOW(cuda_ipc_export(context, own, CHUNK, &exported), CUDA_IPC_OK);
            ALLOW(cuda_ipc_export_release(export_of(swap_in(pool.exports, at, exported.id))), CUDA_IPC_OK);
            break;
        case 3:
            ALLOW(cuda_ipc_export_release(export_of(look(pool.exports, at))), CUDA_IPC_OK);
            break;
        case 4:
            info.size = sizeof(info);
            ALLOW(cuda_ipc_window_info(window_of(look(pool.windows, at)), &info), CUDA_IPC_OK);
            break;
        case 5:
        case 6:
        case 7:
        case 8:
        case 9:
            ALLOW(cuda_ipc_lease_end(lease_of(look(pool.leases, at))), CUDA_IPC_OK);
            break;
        default:
            lease.id = 0;
            ALLOW(cuda_ipc_lease(window_of(look(pool.windows, at)), window_facts.base + at % 5 * CHUNK, 4096, PATIENCE, &lease, &local),
                  CUDA_IPC_OK);
            if (lease.id != 0) {
                ALLOW(cuda_ipc_lease_end(lease_of(swap_in(pool.leases, at, lease.id))), CUDA_IPC_OK);
            }
        }
    }
    return NULL;
}

static void threads(void)
{
    pthread_t thread[THREADS];
    cuda_ipc_stats_t stats;
    uint64_t number;
    int at;

    for (at = 0; at < THREADS; at++) {
        ASSERT(pthread_create(&thread[at], NULL, play, (void *)(uintptr_t)(at + 1)) == 0);
    }
    for (at = 0; at < THREADS; at++) {
        ASSERT(pthread_join(thread[at], NULL) == 0);
    }
    for (at = 0; at < SHARED; at++) {
        ALLOW(cuda_ipc_lease_end(lease_of(pool.leases[at])), CUDA_IPC_OK);
        ALLOW(cuda_ipc_window_release(window_of(pool.windows[at])), CUDA_IPC_OK);
        ALLOW(cuda_ipc_export_release(export_of(pool.exports[at])), CUDA_IPC_OK);
    }
    EXPECT(CUDA_IPC_OK, cuda_ipc_trim(context, &number));
    stats.size = sizeof(stats);
    EXPECT(CUDA_IPC_OK, cuda_ipc_stats(context, &stats));
    /* What main holds is left, and nothing else. */
    ASSERT(stats.windows == 1 && stats.closing_windows == 0 && stats.exports == 1 && stats.waiting_unmaps == 0);
    ASSERT(stats.chunk_leases > 1000);
    verify();
}

/* A forked child: an error of every function that would use anything of its parent's, and no driver call. */
static void forked(void)
{
    uint64_t before = counter(CALLS), number;
    cuda_ipc_lease_t lease, leased;
    cuda_ipc_export_info_t export_info;
    cuda_ipc_window_info_t info;
    cuda_ipc_config_t config;
    cuda_ipc_context_t made;
    cuda_ipc_export_t exported;
    cuda_ipc_window_t opened;
    cuda_ipc_error_t error;
    cuda_ipc_probe_t probe;
    cuda_ipc_stats_t stats;
    unsigned char bytes[CUDA_IPC_RKEY_LEN];
    char text[64];
    size_t length;
    uint32_t type;
    int status;
    pid_t child;

    EXPECT(CUDA_IPC_OK, cuda_ipc_lease(window, window_facts.base, 4096, PATIENCE, &lease, &number));
    before = counter(CALLS);
    fflush(NULL);
    child = (pid_t)SYSTEM(fork());
    if (child == 0) {
        export_info.size = sizeof(export_info);
        info.size = sizeof(info);
        error.size = sizeof(error);
        probe.size = sizeof(probe);
        stats.size = sizeof(stats);
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_config_init(&config, sizeof(config)));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_context_create(NULL, &made));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_retire(context, own, CHUNK, NULL));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_sweep(context, NULL));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_trim(context, NULL));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_purge_peer(context, window_facts.peer, NULL));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_export(context, own, CHUNK, &exported));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_export_info(shared, &export_info));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_export_payload(shared, bytes, sizeof(bytes), &type));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_export_rkey(shared, bytes, sizeof(bytes), &length));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_import(context, rkey, sizeof(rkey), NULL, PATIENCE, &opened));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_import_payload(context, 0, rkey, 64, own, CHUNK, NULL, PATIENCE, &opened));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_window_info(window, &info));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_lease(window, window_facts.base, 1, PATIENCE, &leased, &number));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_lease_holding(window, window_facts.base, 1, PATIENCE, &lease, 1, &leased, &number));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_lease_end(lease));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_probe(context, own, &probe));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_probe_text(context, own, text, sizeof(text), &length));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_stats(context, &stats));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_export_release(shared));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_window_release(window));
        EXPECT(CUDA_IPC_ERR_FORKED, cuda_ipc_context_destroy(context));
        EXPECT(CUDA_IPC_OK, cuda_ipc_last_error(&error));
        ASSERT(error.status == CUDA_IPC_ERR_FORKED && cuda_ipc_version() != 0 && cuda_ipc_status_string(error.status)[0] != 0);
        _exit(0);
    }
    SYSTEM(waitpid(child, &status, 0));
    ASSERT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    ASSERT(counter(CALLS_AFTER_FORK) == 0 && counter(CALLS) >= before);
    EXPECT(CUDA_IPC_OK, cuda_ipc_lease_end(lease));
    verify();
}

/* The child of a process that has only asked for the version may use the library. */
static void forked_early(void)
{
    pid_t child = (pid_t)SYSTEM(fork());
    cuda_ipc_context_t made;
    int status;

    if (child == 0) {
        IPC(cuda_ipc_context_create(NULL, &made));
        IPC(cuda_ipc_context_destroy(made));
        exit(0);
    }
    SYSTEM(waitpid(child, &status, 0));
    ASSERT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(int argc, char **argv)
{
    cuda_ipc_error_t error;

    if (argc != 2) {
        fprintf(stderr, "usage: misuse SOCKET\n");
        return 64;
    }
    error.size = sizeof(error);
    EXPECT(CUDA_IPC_OK, cuda_ipc_last_error(&error));
    ASSERT(error.status == CUDA_IPC_OK && cuda_ipc_version() != 0);
    forked_early();
    set_up(argv[1]);
    nulls();
    sizes();
    arguments();
    stale();
    own_key();
    made_up();
    verify();
    threads();
    forked();
    EXPECT(CUDA_IPC_OK, cuda_ipc_export_release(shared));
    EXPECT(CUDA_IPC_OK, cuda_ipc_window_release(window));
    EXPECT(CUDA_IPC_OK, cuda_ipc_context_destroy(context));
    CUDA(cuMemUnmap(own, CHUNK));
    CUDA(cuMemAddressFree(own, 4 * CHUNK));
    printf("misuse: %lu checks\n", checks);
    return 0;
}
