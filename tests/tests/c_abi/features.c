/*
 * What the C ABI promises beside right bytes: reasons, errors with their facts, the log, settings, and the end of an exporter.
 *
 *     features SOCKET      with the example exporter at the socket
 */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif

#include "common.h"
#include "driver.h"
#include "require.h"

#include <time.h>

#define PATIENCE ((uint64_t)20 * 1000 * 1000 * 1000)
#define CHUNK ((size_t)2 << 20)
#define CHUNKS 5

/* By which route the exporter is reached: valgrind's older releases know no pidfds. */
static uint32_t expected_route(void)
{
    return getenv("NO_PIDFDS") == NULL ? CUDA_IPC_ROUTE_PIDFD : CUDA_IPC_ROUTE_BROKER;
}

static unsigned long checks;

extern uint64_t fake_cuda_calls(const char *function);

#define ASSERT(what) (checks++, require((what), #what, __LINE__))

/* The log, as a program keeps it. */
static struct {
    int lines[6];
    char last_warning[512];
} said;

static void listen_to(int32_t level, const char *line, void *user)
{
    cuda_ipc_stats_t stats;

    ASSERT(user == &said && level >= 1 && level <= 5 && strlen(line) > 5 && strlen(line) < 512);
    /* It may call the library. */
    stats.size = sizeof(stats);
    cuda_ipc_context_t none;
    none.id = 0;
    ASSERT(cuda_ipc_stats(none, &stats) == CUDA_IPC_ERR_HANDLE);
    said.lines[level]++;
    if (level == CUDA_IPC_LOG_WARN) {
        strcpy(said.last_warning, line);
    }
}

static cuda_ipc_context_t create(void (*change)(cuda_ipc_config_t *))
{
    cuda_ipc_config_t config;
    cuda_ipc_context_t context;

    ASSERT(cuda_ipc_config_init(&config, sizeof(config)) == CUDA_IPC_OK);
    config.log = listen_to;
    config.log_user = &said;
    config.log_level = CUDA_IPC_LOG_DEBUG;
    change(&config);
    ASSERT(cuda_ipc_context_create(&config, &context) == CUDA_IPC_OK);
    return context;
}

static void nothing(cuda_ipc_config_t *config) { (void)config; }
static void eager(cuda_ipc_config_t *config) { config->map = CUDA_IPC_MAP_EAGER; }
static void by_broker(cuda_ipc_config_t *config) { config->route = CUDA_IPC_ROUTE_BROKER; }
static void unswept(cuda_ipc_config_t *config) { config->importer_sweeps = CUDA_IPC_OFF; }
static void forgetful(cuda_ipc_config_t *config) { config->keep_idle = CUDA_IPC_OFF; }

static cuda_ipc_window_t import(cuda_ipc_context_t context, const unsigned char *rkey, cuda_ipc_window_info_t *info)
{
    cuda_ipc_window_t window;

    ASSERT(cuda_ipc_import(context, rkey, CUDA_IPC_RKEY_LEN, NULL, PATIENCE, &window) == CUDA_IPC_OK);
    info->size = sizeof(*info);
    ASSERT(cuda_ipc_window_info(window, info) == CUDA_IPC_OK);
    return window;
}

static void compare(uint64_t local, size_t offset)
{
    unsigned char bytes[4096];
    size_t at;

    CUDA(cuMemcpyDtoH_v2(bytes, local, sizeof(bytes)));
    for (at = 0; at < sizeof(bytes); at++) {
        ASSERT(bytes[at] == pattern(offset + at));
    }
}

static cuda_ipc_stats_t stats_of(cuda_ipc_context_t context)
{
    cuda_ipc_stats_t stats;

    stats.size = sizeof(stats);
    ASSERT(cuda_ipc_stats(context, &stats) == CUDA_IPC_OK);
    return stats;
}

/* A chunk of these handle types, at an address of its own. */
static CUdeviceptr chunk(int handle_types)
{
    CUmemAllocationProp properties;
    CUmemAccessDesc access;
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;

    memset(&properties, 0, sizeof(properties));
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = handle_types;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CUDA(cuMemAddressReserve(&address, 2 * CHUNK, 0, 0, 0));
    CUDA(cuMemCreate(&handle, CHUNK, &properties, 0));
    CUDA(cuMemMap(address, CHUNK, 0, handle, 0));
    CUDA(cuMemRelease(handle));
    CUDA(cuMemSetAccess(address, CHUNK, &access, 1));
    return address;
}

/* Why memory can be shared or not: probes, exports, and what is said of them. */
static void reasons(void)
{
    CUdeviceptr good = chunk(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), bad = chunk(0);
    cuda_ipc_context_t context = create(nothing);
    cuda_ipc_export_t shared, again, refused;
    cuda_ipc_export_info_t info;
    cuda_ipc_probe_t probe;
    unsigned char payload[CUDA_IPC_PAYLOAD_LEN], same[CUDA_IPC_PAYLOAD_LEN];
    char text[600];
    uint64_t chunks;
    uint32_t type;
    int warnings;

    probe.size = sizeof(probe);
    ASSERT(cuda_ipc_probe(context, good + 5, &probe) == CUDA_IPC_OK);
    ASSERT(probe.shareable == 1 && probe.handle_type == CUDA_IPC_TYPE_POSIX && probe.reason == CUDA_IPC_OK);
    ASSERT(probe.memory == CUDA_IPC_MEMORY_DEVICE && probe.allowed_handle_types == 1 && probe.device == 0);
    ASSERT(probe.reservation_base == good && probe.reservation_length == 2 * CHUNK);
    ASSERT(probe.chunk_base == good && probe.chunk_length == CHUNK && probe.buffer_id != 0);
    ASSERT(cuda_ipc_probe(context, bad, &probe) == CUDA_IPC_OK);
    ASSERT(probe.shareable == 0 && probe.handle_type == CUDA_IPC_TYPE_NO_IPC && probe.reason == CUDA_IPC_REASON_NO_HANDLE_TYPE);
    ASSERT(cuda_ipc_probe(context, 4096, &probe) == CUDA_IPC_OK);
    ASSERT(probe.shareable == 0 && probe.reason == CUDA_IPC_REASON_NOT_DEVICE_MEMORY && probe.device_uuid[0] == 0);
    ASSERT(cuda_ipc_probe_text(context, bad, text, sizeof(text), NULL) == CUDA_IPC_OK);
    ASSERT(strstr(text, "cannot be shared") != NULL && strstr(text, "asked for no handle type") != NULL);
    ASSERT(stats_of(context).exported_chunks == 0 && stats_of(context).published_chunks == 0);

    ASSERT(cuda_ipc_export(context, good + 100, 1000, &shared) == CUDA_IPC_OK);
    ASSERT(cuda_ipc_export(context, good, CHUNK, &again) == CUDA_IPC_OK);
    info.size = sizeof(info);
    ASSERT(cuda_ipc_export_info(shared, &info) == CUDA_IPC_OK);
    ASSERT(info.handle_type == CUDA_IPC_TYPE_POSIX && info.reason == CUDA_IPC_OK && info.chunks == 1 && info.peer != 0);
    ASSERT(info.base == good + 100 && info.length == 1000);
    ASSERT(info.reservation_base == good && info.reservation_length == 2 * CHUNK);
    ASSERT(cuda_ipc_export_payload(shared, payload, sizeof(payload), &type) == CUDA_IPC_OK && type == CUDA_IPC_TYPE_POSIX);
    ASSERT(cuda_ipc_export_payload(again, same, sizeof(same), &type) == CUDA_IPC_OK);
    ASSERT(memcmp(payload, same, sizeof(same)) == 0 && memcmp(payload, "CIPC", 4) == 0);
    ASSERT(stats_of(context).exports == 2 && stats_of(context).exported_chunks == 1 && stats_of(context).exported_fds == 1);
    ASSERT(cuda_ipc_export_release(shared) == CUDA_IPC_OK && stats_of(context).exported_chunks == 1);
    ASSERT(cuda_ipc_retire(context, good, 1, &chunks) == CUDA_IPC_OK && chunks == 1);
    ASSERT(stats_of(context).exported_chunks == 0 && stats_of(context).retired_chunks == 1);
    ASSERT(cuda_ipc_export_release(again) == CUDA_IPC_OK);

    /* The cause is said once, then only to who wants to know everything. */
    warnings = said.lines[CUDA_IPC_LOG_WARN];
    ASSERT(cuda_ipc_export(context, bad, CHUNK, &refused) == CUDA_IPC_OK);
    ASSERT(said.lines[CUDA_IPC_LOG_WARN] == warnings + 1 && strstr(said.last_warning, "asked for no handle type") != NULL);
    ASSERT(cuda_ipc_export_info(refused, &info) == CUDA_IPC_OK && info.reason == CUDA_IPC_REASON_NO_HANDLE_TYPE);
    ASSERT(cuda_ipc_export_payload(refused, payload, sizeof(payload), &type) == CUDA_IPC_OK && type == CUDA_IPC_TYPE_NO_IPC);
    ASSERT(payload[0] == 0 && cuda_ipc_export_release(refused) == CUDA_IPC_OK);
    warnings = said.lines[CUDA_IPC_LOG_DEBUG];
    ASSERT(cuda_ipc_export(context, bad, CHUNK, &refused) == CUDA_IPC_OK && cuda_ipc_export_release(refused) == CUDA_IPC_OK);
    ASSERT(said.lines[CUDA_IPC_LOG_DEBUG] == warnings + 1 && stats_of(context).no_ipc_exports == 2);
    /* A hole behind the chunk, and the end of the reservation behind that. */
    ASSERT(cuda_ipc_export(context, good, CHUNK + 1, &refused) == CUDA_IPC_OK);
    ASSERT(cuda_ipc_export_info(refused, &info) == CUDA_IPC_OK && info.reason == CUDA_IPC_REASON_HOLE);
    ASSERT(cuda_ipc_export_release(refused) == CUDA_IPC_OK);
    ASSERT(cuda_ipc_export(context, good, 2 * CHUNK + 1, &refused) == CUDA_IPC_OK);
    ASSERT(cuda_ipc_export_info(refused, &info) == CUDA_IPC_OK && info.reason == CUDA_IPC_REASON_LEAVES_RESERVATION);
    ASSERT(cuda_ipc_context_destroy(context) == CUDA_IPC_OK);
}

/* Settings that change how something is imported, and what a hit costs. */
static void imports(const unsigned char *rkey)
{
    cuda_ipc_context_t lazy = create(nothing), at_once = create(eager), broker = create(by_broker), nothing_idle = create(forgetful);
    cuda_ipc_window_info_t info;
    cuda_ipc_window_t window;
    cuda_ipc_lease_t lease;
    cuda_ipc_stats_t before, after;
    uint64_t local, calls;
    int round;

    window = import(lazy, rkey, &info);
    ASSERT(info.length == CHUNKS * CHUNK && info.local_base == 0 && info.writable == 0);
    ASSERT(cuda_ipc_lease(window, info.base, 1, 0, &lease, &local) == CUDA_IPC_WOULD_BLOCK);
    ASSERT(stats_of(lazy).mapped_chunks == 0);
    /* One chunk is asked for, one is imported. */
    ASSERT(cuda_ipc_lease(window, info.base + CHUNK, 4096, PATIENCE, &lease, &local) == CUDA_IPC_OK);
    compare(local, CHUNK);
    ASSERT(stats_of(lazy).mapped_chunks == 1 && stats_of(lazy).misses == 1);
    ASSERT(cuda_ipc_lease_end(lease) == CUDA_IPC_OK);
    ASSERT(cuda_ipc_lease(window, info.base, info.length, PATIENCE, &lease, &local) == CUDA_IPC_OK && cuda_ipc_lease_end(lease) == CUDA_IPC_OK);
    ASSERT(cuda_ipc_window_info(window, &info) == CUDA_IPC_OK && info.local_base == local);
    before = stats_of(lazy);
    calls = fake_cuda_calls(NULL);
    for (round = 0; round < 1000; round++) {
        ASSERT(cuda_ipc_lease(window, info.base + (uint64_t)round % CHUNKS * CHUNK, CHUNK, 0, &lease, &local) == CUDA_IPC_OK);
        ASSERT(local == info.local_base + (uint64_t)round % CHUNKS * CHUNK);
        ASSERT(cuda_ipc_lease_end(lease) == CUDA_IPC_OK);
    }
    after = stats_of(lazy);
    ASSERT(fake_cuda_calls(NULL) == calls && after.misses == before.misses && after.chunk_leases == before.chunk_leases + 1000);
    ASSERT(cuda_ipc_window_release(window) == CUDA_IPC_OK);

    window = import(at_once, rkey, &info);
    ASSERT(stats_of(at_once).mapped_chunks == CHUNKS && info.route == expected_route());
    ASSERT(cuda_ipc_lease(window, info.base, info.length, 0, &lease, &local) == CUDA_IPC_OK);
    compare(local + 3 * CHUNK, 3 * CHUNK);
    ASSERT(cuda_ipc_lease_end(lease) == CUDA_IPC_OK && cuda_ipc_window_release(window) == CUDA_IPC_OK);

    window = import(broker, rkey, &info);
    ASSERT(info.route == CUDA_IPC_ROUTE_BROKER);
    ASSERT(cuda_ipc_lease(window, info.base, 4096, PATIENCE, &lease, &local) == CUDA_IPC_OK);
    compare(local, 0);
    ASSERT(cuda_ipc_lease_end(lease) == CUDA_IPC_OK && cuda_ipc_window_release(window) == CUDA_IPC_OK);

    window = import(nothing_idle, rkey, &info);
    ASSERT(cuda_ipc_lease(window, info.base, 4096, PATIENCE, &lease, &local) == CUDA_IPC_OK && stats_of(nothing_idle).mapped_chunks == 1);
    ASSERT(cuda_ipc_lease_end(lease) == CUDA_IPC_OK && stats_of(nothing_idle).mapped_chunks == 0);

    ASSERT(cuda_ipc_context_destroy(lazy) == CUDA_IPC_OK && cuda_ipc_context_destroy(at_once) == CUDA_IPC_OK);
    ASSERT(cuda_ipc_context_destroy(broker) == CUDA_IPC_OK && cuda_ipc_context_destroy(nothing_idle) == CUDA_IPC_OK);
}

/* A window for writing, and one exporter forgotten. */
static void writing(const unsigned char *rkey)
{
    static unsigned char old[4096], changed[4096], bytes[4096];
    cuda_ipc_context_t context = create(unswept);
    cuda_ipc_import_options_t options;
    cuda_ipc_window_info_t info;
    cuda_ipc_window_t reading, window, again;
    cuda_ipc_lease_t lease, read;
    uint64_t local, elsewhere, unmapped;
    size_t at;

    /* No time for a first contact, which is nobody's fault. */
    ASSERT(cuda_ipc_import(context, rkey, CUDA_IPC_RKEY_LEN, NULL, 0, &window) == CUDA_IPC_WOULD_BLOCK);
    reading = import(context, rkey, &info);
    memset(&options, 0, sizeof(options));
    options.size = sizeof(options);
    options.flags = CUDA_IPC_IMPORT_WRITABLE;
    ASSERT(cuda_ipc_import(context, rkey, CUDA_IPC_RKEY_LEN, &options, PATIENCE, &window) == CUDA_IPC_OK);
    ASSERT(cuda_ipc_window_info(window, &info) == CUDA_IPC_OK && info.writable == 1);
    ASSERT(cuda_ipc_lease(window, info.base + CHUNK, sizeof(bytes), PATIENCE, &lease, &local) == CUDA_IPC_OK);
    ASSERT(cuda_ipc_lease(reading, info.base + CHUNK, sizeof(bytes), PATIENCE, &read, &elsewhere) == CUDA_IPC_OK && local != elsewhere);
    CUDA(cuMemcpyDtoH_v2(old, local, sizeof(old)));
    for (at = 0; at < sizeof(old); at++) {
        changed[at] = (unsigned char)~old[at];
    }
    ASSERT(cuMemcpyHtoD_v2(elsewhere, changed, sizeof(changed)) != 0);
    CUDA(cuMemcpyHtoD_v2(local, changed, sizeof(changed)));
    CUDA(cuMemcpyDtoH_v2(bytes, elsewhere, sizeof(bytes)));
    ASSERT(memcmp(bytes, changed, sizeof(bytes)) == 0);
    CUDA(cuMemcpyHtoD_v2(local, old, sizeof(old)));
    ASSERT(cuda_ipc_lease_end(read) == CUDA_IPC_OK);

    /* What is leased stays until its lease ends, the rest goes at once; the windows there are are no good any more. */
    ASSERT(stats_of(context).mapped_chunks == 2);
    ASSERT(cuda_ipc_purge_peer(context, info.peer, &unmapped) == CUDA_IPC_OK && unmapped == CHUNK);
    ASSERT(stats_of(context).mapped_chunks == 1 && stats_of(context).waiting_unmaps == 1);
    compare(local, CHUNK);
    ASSERT(cuda_ipc_lease_end(lease) == CUDA_IPC_OK);
    ASSERT(cuda_ipc_lease(window, info.base, 1, PATIENCE, &lease, &local) == CUDA_IPC_ERR_WINDOW_CLOSED);
    again = import(context, rkey, &info);
    ASSERT(cuda_ipc_lease(again, info.base, 4096, PATIENCE, &lease, &local) == CUDA_IPC_OK);
    compare(local, 0);
    ASSERT(cuda_ipc_lease_end(lease) == CUDA_IPC_OK && cuda_ipc_context_destroy(context) == CUDA_IPC_OK);
}

static double seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void pause_ms(long ms)
{
    struct timespec pause = {0, ms * 1000000};

    nanosleep(&pause, NULL);
}

/* The exporter frees its memory and exits while a lease is held: the lease's bytes stay, everything else is an error. */
static void the_end(const unsigned char *rkey, int exporter)
{
    cuda_ipc_context_t context = create(nothing), late = create(nothing);
    cuda_ipc_window_info_t info;
    cuda_ipc_window_t window, none;
    cuda_ipc_lease_t lease, more;
    cuda_ipc_status_t status;
    cuda_ipc_error_t error;
    uint64_t local, elsewhere, bytes;
    double limit = seconds() + 20;
    int warnings;

    window = import(context, rkey, &info);
    ASSERT(cuda_ipc_lease(window, info.base, 2 * CHUNK, PATIENCE, &lease, &local) == CUDA_IPC_OK);
    close(exporter);
    do {
        ASSERT(seconds() < limit);
        status = cuda_ipc_lease(window, info.base, 1, PATIENCE, &more, &elsewhere);
        if (status == CUDA_IPC_OK) {
            ASSERT(cuda_ipc_lease_end(more) == CUDA_IPC_OK);
            pause_ms(1);
        }
    } while (status == CUDA_IPC_OK);
    ASSERT(status == CUDA_IPC_ERR_NO_CHUNK || status == CUDA_IPC_ERR_WINDOW_CLOSED);
    error.size = sizeof(error);
    ASSERT(cuda_ipc_last_error(&error) == CUDA_IPC_OK);
    ASSERT(error.status == status && error.pid == info.pid && error.address == info.base && error.retryable == 0);
    compare(local + CHUNK, CHUNK);
    ASSERT(cuda_ipc_lease_end(lease) == CUDA_IPC_OK);
    do {
        ASSERT(seconds() < limit);
        ASSERT(cuda_ipc_trim(context, &bytes) == CUDA_IPC_OK);
        pause_ms(1);
    } while (stats_of(context).mapped_chunks != 0 || stats_of(context).peers != 0);
    status = cuda_ipc_lease(window, info.base, 1, PATIENCE, &more, &elsewhere);
    ASSERT(status == CUDA_IPC_ERR_NO_CHUNK || status == CUDA_IPC_ERR_WINDOW_CLOSED);

    /* Its key leads nowhere, which is said once and then remembered for a while. */
    warnings = said.lines[CUDA_IPC_LOG_WARN];
    do {
        ASSERT(seconds() < limit);
        status = cuda_ipc_import(late, rkey, CUDA_IPC_RKEY_LEN, NULL, PATIENCE, &none);
    } while (status == CUDA_IPC_OK && cuda_ipc_window_release(none) == CUDA_IPC_OK);
    ASSERT(status == CUDA_IPC_ERR_EXPORTER_GONE || status == CUDA_IPC_ERR_OTHER_PROCESS || status == CUDA_IPC_ERR_NO_ROUTE);
    ASSERT(cuda_ipc_last_error(&error) == CUDA_IPC_OK && error.pid == info.pid && strlen(error.text) > 20);
    ASSERT(cuda_ipc_status_is_retryable(status) == 0 && said.lines[CUDA_IPC_LOG_WARN] == warnings + 1);
    ASSERT(cuda_ipc_import(late, rkey, CUDA_IPC_RKEY_LEN, NULL, PATIENCE, &none) == CUDA_IPC_ERR_REFUSED_BEFORE);
    ASSERT(said.lines[CUDA_IPC_LOG_WARN] == warnings + 1 && stats_of(late).refused == 1 && stats_of(late).refused_again == 1);
    ASSERT(cuda_ipc_context_destroy(context) == CUDA_IPC_OK && cuda_ipc_context_destroy(late) == CUDA_IPC_OK);
}

int main(int argc, char **argv)
{
    unsigned char rkey[CUDA_IPC_RKEY_LEN];
    int exporter;

    if (argc != 2) {
        fprintf(stderr, "usage: features SOCKET\n");
        return 64;
    }
    open_driver();
    exporter = receive_rkey(argv[1], rkey);
    reasons();
    imports(rkey);
    writing(rkey);
    the_end(rkey, exporter);
    printf("features: %lu checks\n", checks);
    return 0;
}
