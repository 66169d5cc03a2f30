/* cargo xtask gen-headers */

/*
 * cuda-ipc: CUDA device memory of other processes on this machine, at full speed, also where it has no legacy IPC handle.
 *
 * An exporter makes a context, exports a range, and sends the rkey by any channel. An importer makes a context, opens a window with the rkey, and takes a lease
 * for each use of the memory.
 *
 * Handles are numbers in structures, so that the compiler tells their kinds apart. A handle that was released, made up or of another kind is an error, never a
 * crash. Every function that answers a cuda_ipc_status_t may be called from any thread, never unwinds and never aborts on an error; running out of memory for
 * the library's own bookkeeping ends the process, as it does for most libraries. Pointers that a function is given are used during the call only. Results are
 * written on success only, unless a function says otherwise.
 *
 * After fork, every function answers CUDA_IPC_ERR_FORKED in the child if the parent has made a context before, but for those that say otherwise; none makes a
 * driver call there, and the parent's file descriptors are closed. The child of a process that has made none may use the library.
 *
 * Structures begin with their size. Set it to sizeof, so that a program and a library of different versions understand each other.
 */

#ifndef CUDA_IPC_H
#define CUDA_IPC_H

#include <stddef.h>
#include <stdint.h>

/**
 * Yes, where 0 means the default.
 */
#define CUDA_IPC_ON 1

/**
 * No, where 0 means the default.
 */
#define CUDA_IPC_OFF 2

/**
 * By pidfd where the kernel allows that, else by the exporter's broker.
 */
#define CUDA_IPC_ROUTE_AUTO 1

/**
 * By pidfd only.
 */
#define CUDA_IPC_ROUTE_PIDFD 2

/**
 * By the broker only.
 */
#define CUDA_IPC_ROUTE_BROKER 3

/**
 * An import maps nothing; the first lease of a chunk does.
 */
#define CUDA_IPC_MAP_LAZY 1

/**
 * An import maps what its key names before it returns, and fails where that does.
 */
#define CUDA_IPC_MAP_EAGER 2

/**
 * A sweep interval that means never.
 */
#define CUDA_IPC_NEVER UINT32_MAX

/**
 * Bytes of an rkey.
 */
#define CUDA_IPC_RKEY_LEN 108

/**
 * Bytes of a payload: as many as CUmemFabricHandle and CUipcMemHandle have.
 */
#define CUDA_IPC_PAYLOAD_LEN 64

/**
 * Handle type: the memory cannot be shared; the payload is zeros.
 */
#define CUDA_IPC_TYPE_NO_IPC 0

/**
 * Handle type: the payload is a CUipcMemHandle.
 */
#define CUDA_IPC_TYPE_LEGACY 1

/**
 * Handle type: the payload is a key of this library, of memory that travels as POSIX file descriptors.
 */
#define CUDA_IPC_TYPE_POSIX 2

/**
 * Handle type: another one, of a later version.
 */
#define CUDA_IPC_TYPE_OTHER UINT32_MAX

/**
 * A time limit that is none.
 */
#define CUDA_IPC_FOREVER UINT64_MAX

/**
 * The GPU may write through the window, too.
 */
#define CUDA_IPC_IMPORT_WRITABLE 1

/**
 * Access is for the device of the calling thread's current context; `device` is not looked at.
 */
#define CUDA_IPC_IMPORT_CURRENT_DEVICE 2

/**
 * Bytes of the text of an error, with the 0 at its end.
 */
#define CUDA_IPC_ERROR_TEXT_LEN 384

/**
 * Says nothing.
 */
#define CUDA_IPC_LOG_OFF 1

/**
 * The library cannot do what it is for.
 */
#define CUDA_IPC_LOG_ERROR 2

/**
 * A lane is lost, with the cause: once for each cause.
 */
#define CUDA_IPC_LOG_WARN 3

/**
 * Contexts come and go.
 */
#define CUDA_IPC_LOG_INFO 4

/**
 * Exports, imports, and repeated causes.
 */
#define CUDA_IPC_LOG_DEBUG 5

/**
 * The memory belongs to a memory pool (cudaMallocAsync).
 */
#define CUDA_IPC_MEMORY_POOL 1

/**
 * It is managed memory.
 */
#define CUDA_IPC_MEMORY_MANAGED 2

/**
 * cuIpcGetMemHandle works on it.
 */
#define CUDA_IPC_MEMORY_LEGACY 4

/**
 * It is device memory.
 */
#define CUDA_IPC_MEMORY_DEVICE 8

/**
 * Version of this header: major.
 */
#define CUDA_IPC_VERSION_MAJOR 0

/**
 * Version of this header: minor.
 */
#define CUDA_IPC_VERSION_MINOR 1

/**
 * Version of this header: patch.
 */
#define CUDA_IPC_VERSION_PATCH 0

/**
 * What a function answers: `CUDA_IPC_OK`, or a negative number. New versions may answer numbers that this header does not have.
 */
typedef int32_t cuda_ipc_status_t;

/**
 * Receives a line of the log: its level, and text that ends with 0 and is good during the call. Called from any thread that calls the library, never from one
 * of the library's own, and without locks: it may call the library, but not destroy the context that it is of. `user` is what stands in the configuration.
 */
typedef void (*cuda_ipc_log_fn_t)(int32_t level, const char *line, void *user);

/**
 * Settings of a context. Make one with `cuda_ipc_config_init` and set what is to differ. A field that is 0 is decided by its environment variable, if it has one
 * that is set, otherwise by the default. Later versions add fields at the end.
 */
typedef struct cuda_ipc_config_t {
    /**
     * sizeof of this structure.
     */
    size_t size;
    /**
     * Receives log lines; null for none. The function and `log_user` are used until the context is destroyed and no call of it runs any more.
     */
    cuda_ipc_log_fn_t log;
    /**
     * Handed to `log` as it is.
     */
    void *log_user;
    /**
     * `CUDA_IPC_LOG_*`: the most that is said. CUDA_IPC_LOG=off|error|warn|info|debug; default: warn. Without a function, lines go to standard error if
     * CUDA_IPC_LOG is set, otherwise nowhere.
     */
    int32_t log_level;
    /**
     * `CUDA_IPC_ROUTE_*`: how exporters are reached. CUDA_IPC_ROUTE=auto|pidfd|broker; default: auto.
     */
    uint32_t route;
    /**
     * `CUDA_IPC_ON` or `CUDA_IPC_OFF`: whether importers that may not fetch this process's fds can ask a thread of the library for them.
     * CUDA_IPC_BROKER=y|n; default: on.
     */
    uint32_t broker;
    /**
     * `CUDA_IPC_ON`: lets every process of this user trace this one (PR_SET_PTRACER), which Yama's scope 1 wants for the route by pidfd between processes
     * that are no relatives. Opens more than this library needs, so it is never done unasked. CUDA_IPC_PTRACER=any|none; default: off.
     */
    uint32_t ptracer;
    /**
     * `CUDA_IPC_MAP_*`. CUDA_IPC_MAP=eager|lazy; default: lazy.
     */
    uint32_t map;
    /**
     * `CUDA_IPC_ON` or `CUDA_IPC_OFF`: whether a thread of the library unmaps what exporters have freed and dead exporters have left. If not, `cuda_ipc_trim`
     * is the caller's to call. Default: on.
     */
    uint32_t importer_sweeps;
    /**
     * How often a thread of the library looks for exported memory that was freed without `cuda_ipc_retire`, in milliseconds; `CUDA_IPC_NEVER`: never, then
     * `cuda_ipc_sweep` is the caller's to call. Default: 100.
     */
    uint32_t exporter_sweep_ms;
    /**
     * `CUDA_IPC_ON` or `CUDA_IPC_OFF`: whether imported chunks stay mapped after their last lease. Default: on.
     */
    uint32_t keep_idle;
    /**
     * Windows that may keep address space while they are idle. CUDA_IPC_CACHE_MAX_WINDOWS; default: 4096.
     */
    uint64_t cache_max_windows;
    /**
     * Bytes that may stay mapped while they are idle. CUDA_IPC_CACHE_MAX_SIZE, with k, m, g or t for powers of 1024; default: 1t.
     */
    uint64_t cache_max_size;
    /**
     * Bytes of address space that all windows may reserve. Default: 64 TiB.
     */
    uint64_t cache_max_address_space;
    /**
     * File descriptors of the soft RLIMIT_NOFILE that the exporter leaves to the application; chunks past the rest go by the broker. Default: 256.
     */
    uint64_t fd_reserve;
    /**
     * Folder for the broker's socket file, for processes in other network namespaces; made if it is not there. Copied. CUDA_IPC_SOCKET_DIR; default: none.
     */
    const char *socket_dir;
    /**
     * Users besides this process's own that are served and believed, as this user namespace numbers them. Copied. Default: none.
     */
    const uint32_t *allowed_uids;
    /**
     * How many there are.
     */
    size_t allowed_uid_count;
} cuda_ipc_config_t;

/**
 * An exporter and a cache of imports, with their settings. The caller's until `cuda_ipc_context_destroy`. `id` 0 is none.
 */
typedef struct cuda_ipc_context_t {
    /**
     * The library's business.
     */
    uint64_t id;
} cuda_ipc_context_t;

/**
 * A range of this process's memory that others may import. The caller's until `cuda_ipc_export_release` or the end of its context. `id` 0 is none.
 */
typedef struct cuda_ipc_export_t {
    /**
     * The library's business.
     */
    uint64_t id;
} cuda_ipc_export_t;

/**
 * What is known of an export. Set `size` before it is passed.
 */
typedef struct cuda_ipc_export_info_t {
    /**
     * sizeof of this structure.
     */
    size_t size;
    /**
     * `CUDA_IPC_TYPE_*`.
     */
    uint32_t handle_type;
    /**
     * `CUDA_IPC_OK`, or why the memory cannot be shared: `CUDA_IPC_REASON_*` mostly.
     */
    cuda_ipc_status_t reason;
    /**
     * First address of the exported range; for `CUDA_IPC_TYPE_LEGACY` of the whole allocation, which is what an importer gets. A transport sends these two
     * numbers with the payload.
     */
    uint64_t base;
    /**
     * Its length in bytes.
     */
    uint64_t length;
    /**
     * First address of the reservation that the payload names; 0 if it names none.
     */
    uint64_t reservation_base;
    /**
     * Its length in bytes.
     */
    uint64_t reservation_length;
    /**
     * Physical chunks that the range touches.
     */
    uint64_t chunks;
    /**
     * Identity of this process's exporter, in all its payloads; 0 if the payload has none.
     */
    uint64_t peer;
    /**
     * UUID of the GPU; zeros if it is not known.
     */
    uint8_t device_uuid[16];
} cuda_ipc_export_info_t;

/**
 * How something is to be imported. Zero it and set `size`, then what is to differ. Later versions add fields at the end.
 */
typedef struct cuda_ipc_import_options_t {
    /**
     * sizeof of this structure.
     */
    size_t size;
    /**
     * `CUDA_IPC_IMPORT_*`, added.
     */
    uint32_t flags;
    /**
     * Ordinal of the device that gets access, as this process numbers them.
     */
    int32_t device;
} cuda_ipc_import_options_t;

/**
 * Another process's memory, seen from here. The caller's until `cuda_ipc_window_release` or the end of its context. `id` 0 is none.
 */
typedef struct cuda_ipc_window_t {
    /**
     * The library's business.
     */
    uint64_t id;
} cuda_ipc_window_t;

/**
 * What is known of a window. Set `size` before it is passed.
 */
typedef struct cuda_ipc_window_info_t {
    /**
     * sizeof of this structure.
     */
    size_t size;
    /**
     * First address of the range of its key, in the exporter.
     */
    uint64_t base;
    /**
     * Its length in bytes.
     */
    uint64_t length;
    /**
     * First address of the reservation of which leases can be taken, in the exporter.
     */
    uint64_t reservation_base;
    /**
     * Its length in bytes.
     */
    uint64_t reservation_length;
    /**
     * Where the reservation begins here; 0 while it has no address space here. Changes only while nothing of it is leased.
     */
    uint64_t local_base;
    /**
     * Identity of the exporter, for `cuda_ipc_purge_peer`; 0 for a legacy handle, which does not say.
     */
    uint64_t peer;
    /**
     * Pid of the exporter, in its own PID namespace; 0 for a legacy handle.
     */
    uint32_t pid;
    /**
     * `CUDA_IPC_ROUTE_PIDFD` or `CUDA_IPC_ROUTE_BROKER`: how the exporter was reached; 0 for memory of this process and for a legacy handle.
     */
    uint32_t route;
    /**
     * 1 for memory of this process, whose addresses are its own; otherwise 0.
     */
    int32_t own_process;
    /**
     * 1 if the GPU may write through it.
     */
    int32_t writable;
} cuda_ipc_window_info_t;

/**
 * What is known of a failed call. Set `size` before it is passed.
 */
typedef struct cuda_ipc_error_t {
    /**
     * sizeof of this structure.
     */
    size_t size;
    /**
     * What the call answered.
     */
    cuda_ipc_status_t status;
    /**
     * 1 if the same call may succeed later without anybody changing a setting.
     */
    int32_t retryable;
    /**
     * The errno of the system call that failed; 0 if none did.
     */
    int32_t system_errno;
    /**
     * The CUresult of the driver call that failed; 0 if none did.
     */
    uint32_t cuda_result;
    /**
     * Pid of the exporter that it is about, in the exporter's PID namespace; 0 if it is about none.
     */
    uint32_t pid;
    /**
     * 0.
     */
    uint32_t reserved;
    /**
     * The address that it is about, in the process that owns the memory; 0 if it is about none.
     */
    uint64_t address;
    /**
     * One line of English that ends with 0: the step, what failed, where.
     */
    char text[CUDA_IPC_ERROR_TEXT_LEN];
} cuda_ipc_error_t;

/**
 * The use of a part of a window: while it lasts, the memory stays mapped. The caller's until `cuda_ipc_lease_end`, also past the end of its window and context.
 * `id` 0 is none.
 */
typedef struct cuda_ipc_lease_t {
    /**
     * The library's business.
     */
    uint64_t id;
} cuda_ipc_lease_t;

/**
 * What is known of a pointer. Set `size` before it is passed.
 */
typedef struct cuda_ipc_probe_t {
    /**
     * sizeof of this structure.
     */
    size_t size;
    /**
     * 1 if an export of the chunk at the pointer would be no `CUDA_IPC_TYPE_NO_IPC`, as far as can be seen without one.
     */
    int32_t shareable;
    /**
     * `CUDA_IPC_TYPE_*` of such an export.
     */
    uint32_t handle_type;
    /**
     * `CUDA_IPC_OK`, or why not: `CUDA_IPC_REASON_*`.
     */
    cuda_ipc_status_t reason;
    /**
     * `CUDA_IPC_MEMORY_*`, added.
     */
    uint32_t memory;
    /**
     * Handle types that the allocator asked for, as CUmemAllocationHandleType numbers them, added: 1 POSIX_FD, 8 FABRIC.
     */
    uint64_t allowed_handle_types;
    /**
     * First address of the reservation or allocation that holds it; 0 if the driver knows none.
     */
    uint64_t reservation_base;
    /**
     * Its length in bytes.
     */
    uint64_t reservation_length;
    /**
     * First address of the physical chunk at the pointer; 0 for memory without one.
     */
    uint64_t chunk_base;
    /**
     * Its length in bytes.
     */
    uint64_t chunk_length;
    /**
     * The driver's CU_POINTER_ATTRIBUTE_BUFFER_ID; 0 where nothing is mapped.
     */
    uint64_t buffer_id;
    /**
     * Ordinal of the device, in this process.
     */
    int32_t device;
    /**
     * 0.
     */
    uint32_t reserved;
    /**
     * UUID of the device; zeros if it is not known.
     */
    uint8_t device_uuid[16];
} cuda_ipc_probe_t;

/**
 * Counts and totals of a context, as of now. Set `size` before it is passed.
 */
typedef struct cuda_ipc_stats_t {
    /**
     * sizeof of this structure.
     */
    size_t size;
    /**
     * Exports that have not been released, of whatever type.
     */
    uint64_t exports;
    /**
     * Exports so far of memory that cannot be shared.
     */
    uint64_t no_ipc_exports;
    /**
     * Chunks that are exported now.
     */
    uint64_t exported_chunks;
    /**
     * Their bytes.
     */
    uint64_t exported_bytes;
    /**
     * File descriptors held for them.
     */
    uint64_t exported_fds;
    /**
     * Chunks exported so far.
     */
    uint64_t published_chunks;
    /**
     * Chunks withdrawn so far.
     */
    uint64_t retired_chunks;
    /**
     * Among these, chunks that were found freed.
     */
    uint64_t swept_chunks;
    /**
     * Imports so far that failed.
     */
    uint64_t failed_imports;
    /**
     * Windows that have not been released.
     */
    uint64_t windows;
    /**
     * Released windows of any context that wait for leases.
     */
    uint64_t closing_windows;
    /**
     * Exporters known now.
     */
    uint64_t peers;
    /**
     * Reservations that have address space here now.
     */
    uint64_t mirrored_windows;
    /**
     * Chunks mapped now.
     */
    uint64_t mapped_chunks;
    /**
     * Their bytes.
     */
    uint64_t mapped_bytes;
    /**
     * Among the chunks, those that wait for leases to end before they are unmapped.
     */
    uint64_t waiting_unmaps;
    /**
     * Bytes of address space reserved now.
     */
    uint64_t address_space;
    /**
     * Chunks leased so far; a lease of three chunks counts three.
     */
    uint64_t chunk_leases;
    /**
     * Leases so far that were no hits.
     */
    uint64_t misses;
    /**
     * Chunks imported so far.
     */
    uint64_t imported_chunks;
    /**
     * Chunks unmapped so far because their exporter has withdrawn them.
     */
    uint64_t unmapped_dead;
    /**
     * Chunks unmapped so far because another took their place.
     */
    uint64_t unmapped_replaced;
    /**
     * Chunks unmapped so far because of a limit, or because nothing idle is kept.
     */
    uint64_t unmapped_limit;
    /**
     * Chunks unmapped so far because their exporter has exited or was purged.
     */
    uint64_t unmapped_purged;
    /**
     * Contacts with exporters so far that failed.
     */
    uint64_t refused;
    /**
     * Keys so far that were answered by a refusal that was remembered.
     */
    uint64_t refused_again;
    /**
     * Passes of the importing side's thread.
     */
    uint64_t sweeps;
    /**
     * Legacy handles open now.
     */
    uint64_t legacy_handles;
} cuda_ipc_stats_t;

/**
 * It is done.
 */
#define CUDA_IPC_OK 0

/**
 * Not done in the time given, or not without waiting where the time was 0. Nothing is wrong; the same call may succeed later.
 */
#define CUDA_IPC_WOULD_BLOCK (-1)

/**
 * A pointer that must not be null is.
 */
#define CUDA_IPC_ERR_NULL (-2)

/**
 * A structure's size is none that this library knows, or fields that it does not know are not 0.
 */
#define CUDA_IPC_ERR_STRUCT_SIZE (-3)

/**
 * A handle that this library has never given out, or of another kind.
 */
#define CUDA_IPC_ERR_HANDLE (-4)

/**
 * A handle that has been released, ended or destroyed.
 */
#define CUDA_IPC_ERR_STALE_HANDLE (-5)

/**
 * A value that the parameter or field does not take.
 */
#define CUDA_IPC_ERR_ARGUMENT (-6)

/**
 * An empty range, one that wraps around, or one outside what the handle is for.
 */
#define CUDA_IPC_ERR_RANGE (-7)

/**
 * The caller's buffer is too small; the length that it needs was stored where the function takes one.
 */
#define CUDA_IPC_ERR_BUFFER (-8)

/**
 * The process is a fork of one that used the library. Nothing here works in it: the CUDA driver does not either.
 */
#define CUDA_IPC_ERR_FORKED (-9)

/**
 * A defect of the library. It was stopped at the function that was called.
 */
#define CUDA_IPC_ERR_INTERNAL (-10)

/**
 * More handles of a kind at a time than the library can number.
 */
#define CUDA_IPC_ERR_TOO_MANY_HANDLES (-11)

/**
 * An environment variable of the library's has a value that it does not take. The error's text names it.
 */
#define CUDA_IPC_ERR_ENVIRONMENT (-12)

/**
 * The exporter has said that this memory cannot be shared: take another way to it.
 */
#define CUDA_IPC_ERR_NO_IPC (-100)

/**
 * The bytes are no rkey or payload of this library, or damaged.
 */
#define CUDA_IPC_ERR_KEY (-101)

/**
 * Made by a version of the library that this one does not understand.
 */
#define CUDA_IPC_ERR_KEY_VERSION (-102)

/**
 * A handle type, or a kind of key, that this version cannot import.
 */
#define CUDA_IPC_ERR_HANDLE_TYPE (-103)

/**
 * The key was made on another machine, or before a reboot.
 */
#define CUDA_IPC_ERR_OTHER_HOST (-104)

/**
 * The exporter is in another PID namespace, and there is no other way to it.
 */
#define CUDA_IPC_ERR_OTHER_PID_NAMESPACE (-105)

/**
 * The exporter has exited.
 */
#define CUDA_IPC_ERR_EXPORTER_GONE (-106)

/**
 * The kernel does not let this process reach the exporter (ptrace rules, seccomp, users).
 */
#define CUDA_IPC_ERR_PERMISSION (-107)

/**
 * The kernel has no pidfd_open or pidfd_getfd.
 */
#define CUDA_IPC_ERR_NO_PIDFD (-108)

/**
 * The exporter's broker could not be reached, or gave nothing.
 */
#define CUDA_IPC_ERR_BROKER (-109)

/**
 * The exporter's broker gave nothing, but may do so later.
 */
#define CUDA_IPC_ERR_BROKER_BUSY (-110)

/**
 * The exporter can be reached neither by pidfd nor by its broker.
 */
#define CUDA_IPC_ERR_NO_ROUTE (-111)

/**
 * The process with the exporter's number is another one now, or has replaced itself.
 */
#define CUDA_IPC_ERR_OTHER_PROCESS (-112)

/**
 * The exporter's table makes no sense.
 */
#define CUDA_IPC_ERR_TABLE (-113)

/**
 * The exporter could not be reached a moment ago and is not asked again yet.
 */
#define CUDA_IPC_ERR_REFUSED_BEFORE (-114)

/**
 * No live memory at an address of the range: it was freed, or never exported.
 */
#define CUDA_IPC_ERR_NO_CHUNK (-115)

/**
 * The exporter frees and replaces its memory faster than it can be imported.
 */
#define CUDA_IPC_ERR_KEPT_CHANGING (-116)

/**
 * Too many leases on one chunk.
 */
#define CUDA_IPC_ERR_TOO_MANY_LEASES (-117)

/**
 * No address space left for a window within the limits.
 */
#define CUDA_IPC_ERR_ADDRESS_SPACE (-118)

/**
 * The exporter has exited or was purged; a new key may open a new window.
 */
#define CUDA_IPC_ERR_WINDOW_CLOSED (-119)

/**
 * The import failed for a reason that has no number yet; the error's text names it.
 */
#define CUDA_IPC_ERR_IMPORT (-120)

/**
 * The GPU that holds the memory is not visible to this process.
 */
#define CUDA_IPC_ERR_DEVICE_NOT_VISIBLE (-121)

/**
 * What the driver mapped is shorter than what the exporter says.
 */
#define CUDA_IPC_ERR_TOO_SHORT (-122)

/**
 * The device that asks cannot reach memory of the one that holds it.
 */
#define CUDA_IPC_ERR_NO_PEER_ACCESS (-123)

/**
 * Not memory that the CUDA driver knows.
 */
#define CUDA_IPC_REASON_NOT_DEVICE_MEMORY (-200)

/**
 * Managed memory has no handle.
 */
#define CUDA_IPC_REASON_MANAGED (-201)

/**
 * Memory of cuMemAlloc in the middle of other memory: its legacy handle carries it alone.
 */
#define CUDA_IPC_REASON_LEGACY (-202)

/**
 * The allocator asked for no handle type.
 */
#define CUDA_IPC_REASON_NO_HANDLE_TYPE (-203)

/**
 * The allocator asked for a fabric handle only.
 */
#define CUDA_IPC_REASON_FABRIC_ONLY (-204)

/**
 * A pool that was created without the POSIX_FD handle type.
 */
#define CUDA_IPC_REASON_POOL_WITHOUT_HANDLE (-205)

/**
 * Memory of a POSIX_FD pool in the middle of other memory: the pool's handle carries it alone.
 */
#define CUDA_IPC_REASON_POSIX_POOL (-206)

/**
 * The range has a hole.
 */
#define CUDA_IPC_REASON_HOLE (-207)

/**
 * The range leaves the reservation in which it begins.
 */
#define CUDA_IPC_REASON_LEAVES_RESERVATION (-208)

/**
 * The range lies on more than one GPU.
 */
#define CUDA_IPC_REASON_SEVERAL_DEVICES (-209)

/**
 * A chunk that is not a whole number of 2 MiB granules.
 */
#define CUDA_IPC_REASON_UNALIGNED (-210)

/**
 * It was freed or replaced during the export, again and again.
 */
#define CUDA_IPC_REASON_KEPT_CHANGING (-211)

/**
 * The export table is full.
 */
#define CUDA_IPC_REASON_TABLE_FULL (-212)

/**
 * The process has no file descriptor left.
 */
#define CUDA_IPC_REASON_TOO_MANY_FILES (-213)

/**
 * The export table could not be made.
 */
#define CUDA_IPC_REASON_NO_TABLE (-214)

/**
 * A driver call failed.
 */
#define CUDA_IPC_REASON_DRIVER (-215)

/**
 * A reason that has no number yet; the error's text names it.
 */
#define CUDA_IPC_REASON_OTHER (-216)

/**
 * Host memory that the driver knows.
 */
#define CUDA_IPC_REASON_HOST_MEMORY (-217)

/**
 * The allocator asked for a fabric handle only, and the driver refuses these.
 */
#define CUDA_IPC_REASON_FABRIC_REFUSED (-218)

/**
 * The driver exports no POSIX file descriptors on this device.
 */
#define CUDA_IPC_REASON_POSIX_REFUSED (-219)

/**
 * Memory of the device's default pool, which has no handle type.
 */
#define CUDA_IPC_REASON_DEFAULT_POOL (-220)

/**
 * The range leaves the allocation in which it begins.
 */
#define CUDA_IPC_REASON_LEAVES_ALLOCATION (-221)

/**
 * There is no CUDA driver, or one that lacks a function that the library needs.
 */
#define CUDA_IPC_ERR_NO_DRIVER (-300)

/**
 * The driver does not initialise: no device, or a kernel module of another version.
 */
#define CUDA_IPC_ERR_DRIVER_INIT (-301)

/**
 * A driver call failed; the error says which, and its CUresult.
 */
#define CUDA_IPC_ERR_DRIVER (-302)

/**
 * A system call failed; the error says which, and its errno.
 */
#define CUDA_IPC_ERR_SYSTEM (-303)

/**
 * A table of open files is full: the process's, or the system's.
 */
#define CUDA_IPC_ERR_TOO_MANY_FILES (-304)

/**
 * The system has no memory left.
 */
#define CUDA_IPC_ERR_NO_MEMORY (-305)

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Makes `config` ready to be filled in: zeroes `size` bytes and stores `size` in its first field. Pass `sizeof(cuda_ipc_config_t)`.
 *
 * Errors: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_STRUCT_SIZE`. Usable from any thread.
 */
cuda_ipc_status_t cuda_ipc_config_init(struct cuda_ipc_config_t *config,
                                       size_t size);

/**
 * Makes a context: opens the CUDA driver and initialises it. It starts no thread and exports nothing yet.
 *
 * `config` may be null: everything by the environment and defaults. What it points to is copied, but for `log` and `log_user`. The context in `*context` is the
 * caller's, who ends it with `cuda_ipc_context_destroy`; `*context` is written on success only.
 *
 * Errors: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_STRUCT_SIZE`, `CUDA_IPC_ERR_ARGUMENT` and `CUDA_IPC_ERR_ENVIRONMENT` (the error's text names field or variable),
 * `CUDA_IPC_ERR_NO_DRIVER`, `CUDA_IPC_ERR_DRIVER_INIT`, `CUDA_IPC_ERR_FORKED`, `CUDA_IPC_ERR_SYSTEM`. Usable from any thread.
 */
cuda_ipc_status_t cuda_ipc_context_create(const struct cuda_ipc_config_t *config,
                                          struct cuda_ipc_context_t *context);

/**
 * Ends a context: its exports are released, so that importers see their chunks die; its windows are released and unmapped when idle; handles of both are
 * stale. Leases that have not ended keep their memory mapped, and are to be ended as before. Calls of other threads that use it end as usual.
 *
 * Errors: `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
 */
cuda_ipc_status_t cuda_ipc_context_destroy(struct cuda_ipc_context_t context);

/**
 * Withdraws every exported chunk that touches `[address, address + length)`, right before the caller frees or unmaps that memory: when this returns, importers
 * know that it is gone, and nothing of the library's keeps it. Keys and exports stay good for what is in their range later.
 *
 * `address` and `length` are bytes of this process. `*chunks`, if `chunks` is not null, is how many were withdrawn. Makes no driver call, so it may be called from
 * a hook inside the driver.
 *
 * Errors: `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_RANGE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
 */
cuda_ipc_status_t cuda_ipc_retire(struct cuda_ipc_context_t context,
                                  uint64_t address,
                                  uint64_t length,
                                  uint64_t *chunks);

/**
 * Withdraws every exported chunk whose memory has been freed without a word, or whose file descriptor the application has closed. The library's thread does so by
 * itself unless `exporter_sweep_ms` is `CUDA_IPC_NEVER`. `*chunks`, if `chunks` is not null, is how many were withdrawn.
 *
 * Errors: `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
 */
cuda_ipc_status_t cuda_ipc_sweep(struct cuda_ipc_context_t context,
                                 uint64_t *chunks);

/**
 * Unmaps what exporters have freed, what exporters that have exited have left, and what is beyond the limits, unless it is leased. The library's thread does so
 * by itself unless `importer_sweeps` is off. `*bytes`, if `bytes` is not null, is how many bytes of the dead were unmapped.
 *
 * Errors: `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
 */
cuda_ipc_status_t cuda_ipc_trim(struct cuda_ipc_context_t context,
                                uint64_t *bytes);

/**
 * Forgets an exporter: unmaps what is idle of it, lets no more be imported through the windows there are, and unmaps the rest as its leases end. `peer` is what
 * `cuda_ipc_window_info` says; a peer that is not known is none to forget, and no error. `*bytes`, if `bytes` is not null, is how many bytes were unmapped now.
 * Importing a key of the same exporter later makes new windows.
 *
 * Errors: `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
 */
cuda_ipc_status_t cuda_ipc_purge_peer(struct cuda_ipc_context_t context,
                                      uint64_t peer,
                                      uint64_t *bytes);

/**
 * Shares `[address, address + length)`, device memory of this process, with every process of this user that is given its key.
 *
 * The range may begin and end anywhere and span any number of physical chunks of a reservation; or lie in one allocation of a POSIX_FD pool or of cuMemAlloc. Memory that cannot be shared is exported as `CUDA_IPC_TYPE_NO_IPC`: that is
 * `CUDA_IPC_OK` too, `cuda_ipc_export_info` says why, and its key tells the importer to take another way. Chunks that are shared already cost no export call.
 * A shared chunk stays in memory until it is withdrawn: by `cuda_ipc_retire`, by the release of its last export, or by the library's thread after its memory
 * was freed. The export in `*handle` is the caller's, who ends it with `cuda_ipc_export_release`.
 *
 * Nothing here waits for work on the memory: before another process is told to read, wait for what was written (cuCtxSynchronize, or the stream or event of the
 * work; cuMemcpyHtoD from pageable memory returns before its bytes are there).
 *
 * Errors: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_RANGE` for an empty range or one that wraps around,
 * `CUDA_IPC_ERR_TOO_MANY_HANDLES`, `CUDA_IPC_ERR_FORKED`. Usable from any thread; no context need be current.
 */
cuda_ipc_status_t cuda_ipc_export(struct cuda_ipc_context_t context,
                                  uint64_t address,
                                  uint64_t length,
                                  struct cuda_ipc_export_t *handle);

/**
 * Says what is known of an export.
 *
 * Errors: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_STRUCT_SIZE`, `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
 */
cuda_ipc_status_t cuda_ipc_export_info(struct cuda_ipc_export_t handle,
                                       struct cuda_ipc_export_info_t *info);

/**
 * Gives the handle type and the payload of `CUDA_IPC_PAYLOAD_LEN` bytes alone, for a transport that carries base and length of the range by itself.
 *
 * The bytes are the same for every export of the same reservation. `capacity` is the room at `payload` in bytes.
 *
 * Errors: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_BUFFER`, `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`; nothing is written then.
 * Usable from any thread.
 */
cuda_ipc_status_t cuda_ipc_export_payload(struct cuda_ipc_export_t handle,
                                          void *payload,
                                          size_t capacity,
                                          uint32_t *handle_type);

/**
 * Gives the whole rkey: handle type, payload, range and GPU, for any channel to the importer, which passes it to `cuda_ipc_import`.
 *
 * `capacity` is the room at `rkey` in bytes; `CUDA_IPC_RKEY_LEN` are enough for a library of this header's version. `*length` is how many bytes the rkey has, also
 * where they do not fit; with `rkey` null it is all that is asked for.
 *
 * Errors: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_BUFFER`, `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
 */
cuda_ipc_status_t cuda_ipc_export_rkey(struct cuda_ipc_export_t handle,
                                       void *rkey,
                                       size_t capacity,
                                       size_t *length);

/**
 * Ends an export: chunks that no other export covers are withdrawn, and importers see them die. For memory that lives on; before it is freed,
 * `cuda_ipc_retire` does the same for all exports of a range.
 *
 * Errors: `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
 */
cuda_ipc_status_t cuda_ipc_export_release(struct cuda_ipc_export_t handle);

/**
 * Opens a window on the memory that an rkey names. One exporter's reservation has one window in a context for each kind of access, however often it is opened.
 *
 * `rkey` are the `length` bytes that `cuda_ipc_export_rkey` gave. `options` may be null: the device of the calling thread's current context, reading only. The first key
 * of an exporter costs a contact of some tens of microseconds; nothing is mapped yet, unless the context maps eagerly: then the whole range is mapped before
 * this returns. `timeout_ns` limits all that, in nanoseconds from now; `CUDA_IPC_FOREVER` does not. A refusal is remembered for each exporter, answered at once
 * for a while (`CUDA_IPC_ERR_REFUSED_BEFORE`), and then tried again. The window in `*window` is the caller's, who ends it with `cuda_ipc_window_release`.
 *
 * Errors: `CUDA_IPC_ERR_NO_IPC` if the exporter says that the memory cannot be shared; the codes from -100 to -199; `CUDA_IPC_ERR_NULL`,
 * `CUDA_IPC_ERR_STRUCT_SIZE`, `CUDA_IPC_ERR_ARGUMENT`, `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_WOULD_BLOCK`, `CUDA_IPC_ERR_DRIVER`,
 * `CUDA_IPC_ERR_SYSTEM`, `CUDA_IPC_ERR_TOO_MANY_FILES`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
 */
cuda_ipc_status_t cuda_ipc_import(struct cuda_ipc_context_t context,
                                  const void *rkey,
                                  size_t length,
                                  const struct cuda_ipc_import_options_t *options,
                                  uint64_t timeout_ns,
                                  struct cuda_ipc_window_t *window);

/**
 * As `cuda_ipc_import`, for a transport that carries the range by itself: of what `cuda_ipc_export_payload` gave, and the range of that export.
 *
 * `payload` has `payload_length` bytes of type `handle_type`; `base` and `length` are the exported range, in the exporter.
 *
 * Errors: as `cuda_ipc_import`; `CUDA_IPC_ERR_RANGE` if the range is not inside what the payload names.
 */
cuda_ipc_status_t cuda_ipc_import_payload(struct cuda_ipc_context_t context,
                                          uint32_t handle_type,
                                          const void *payload,
                                          size_t payload_length,
                                          uint64_t base,
                                          uint64_t length,
                                          const struct cuda_ipc_import_options_t *options,
                                          uint64_t timeout_ns,
                                          struct cuda_ipc_window_t *window);

/**
 * Says what is known of a window.
 *
 * Errors: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_STRUCT_SIZE`, `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
 */
cuda_ipc_status_t cuda_ipc_window_info(struct cuda_ipc_window_t window,
                                       struct cuda_ipc_window_info_t *info);

/**
 * Ends a window: its handle is stale. Leases of it go on; what is mapped stays under the context's limits, for the next import of the same reservation.
 *
 * Errors: `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
 */
cuda_ipc_status_t cuda_ipc_window_release(struct cuda_ipc_window_t window);

/**
 * Says more about the last call on this thread that did not answer `CUDA_IPC_OK`. Calls that succeed change nothing here; a thread without a failed call
 * gets `CUDA_IPC_OK` as its `status`.
 *
 * Errors, none of which is remembered: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_STRUCT_SIZE`. Each thread has its own; usable in a forked child.
 */
cuda_ipc_status_t cuda_ipc_last_error(struct cuda_ipc_error_t *error);

/**
 * Leases `[address, address + length)`, addresses of the exporter: the memory that is there now, mapped here until the lease ends.
 *
 * The range may be any part of the reservation that the window's key names, also memory that the exporter has added later. `*local_address` is where it is in this
 * process. A hit costs some tens of nanoseconds: no lock, system call, driver call or allocation (but where a thread takes its first lease, or more are held at a
 * time than ever before). Where chunks are not mapped yet, or were replaced, they are imported by the calling thread; `timeout_ns` is how long that may take
 * in all, in nanoseconds. With 0 nothing is imported and nobody waited for: a hit, or `CUDA_IPC_WOULD_BLOCK`. End the lease when the work that uses the address is complete, not when it was submitted.
 *
 * Errors: `CUDA_IPC_WOULD_BLOCK`; `CUDA_IPC_ERR_NO_CHUNK` if there is no live memory at an address of the range (other ranges go on working);
 * `CUDA_IPC_ERR_RANGE`, `CUDA_IPC_ERR_WINDOW_CLOSED`, `CUDA_IPC_ERR_KEPT_CHANGING` and others from -100 to -199; `CUDA_IPC_ERR_NULL`,
 * `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_TOO_MANY_HANDLES`, `CUDA_IPC_ERR_DRIVER`, `CUDA_IPC_ERR_SYSTEM`, `CUDA_IPC_ERR_FORKED`.
 * Usable from any thread.
 */
cuda_ipc_status_t cuda_ipc_lease(struct cuda_ipc_window_t window,
                                 uint64_t address,
                                 uint64_t length,
                                 uint64_t timeout_ns,
                                 struct cuda_ipc_lease_t *lease,
                                 uint64_t *local_address);

/**
 * As `cuda_ipc_lease`, for a caller that holds `count` leases at `holding`: where a replaced chunk is in use by one of them, the answer is `CUDA_IPC_WOULD_BLOCK`
 * at once, since the caller would wait for itself. They may have been taken with other handles of the same memory: a context has one window for each reservation of
 * an exporter and each kind of access, however often it was opened. Handles in `holding` that are of no live lease of it do not matter.
 *
 * Errors: as `cuda_ipc_lease`; `CUDA_IPC_ERR_ARGUMENT` for more than 65536 leases.
 */
cuda_ipc_status_t cuda_ipc_lease_holding(struct cuda_ipc_window_t window,
                                         uint64_t address,
                                         uint64_t length,
                                         uint64_t timeout_ns,
                                         const struct cuda_ipc_lease_t *holding,
                                         size_t count,
                                         struct cuda_ipc_lease_t *lease,
                                         uint64_t *local_address);

/**
 * Ends a lease: its memory may be unmapped from here on. Any thread may end it.
 *
 * Errors: `CUDA_IPC_ERR_STALE_HANDLE` if it has ended before, which hurts nobody; `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread.
 */
cuda_ipc_status_t cuda_ipc_lease_end(struct cuda_ipc_lease_t lease);

/**
 * Says what is known of the pointer `address`, an address of this process. A few driver calls; nothing is exported.
 *
 * Errors: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_STRUCT_SIZE`, `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_DRIVER` if the driver does not answer,
 * `CUDA_IPC_ERR_FORKED`. An address of nothing is no error but a `reason`. Usable from any thread.
 */
cuda_ipc_status_t cuda_ipc_probe(struct cuda_ipc_context_t context,
                                 uint64_t address,
                                 struct cuda_ipc_probe_t *probe);

/**
 * Says the same in lines of English, for people.
 *
 * `text` has room for `capacity` bytes, with the 0 at the end. `*length`, if `length` is not null, is how many bytes all of it has without that 0, also where it does not
 * fit; with `text` null it is all that is asked for.
 *
 * Errors: as `cuda_ipc_probe`, and `CUDA_IPC_ERR_BUFFER`. Usable from any thread.
 */
cuda_ipc_status_t cuda_ipc_probe_text(struct cuda_ipc_context_t context,
                                      uint64_t address,
                                      char *text,
                                      size_t capacity,
                                      size_t *length);

/**
 * Says what a context has done and holds.
 *
 * Errors: `CUDA_IPC_ERR_NULL`, `CUDA_IPC_ERR_STRUCT_SIZE`, `CUDA_IPC_ERR_HANDLE`, `CUDA_IPC_ERR_STALE_HANDLE`, `CUDA_IPC_ERR_FORKED`. Usable from any thread; takes
 * locks that misses take, so it is not for every transfer.
 */
cuda_ipc_status_t cuda_ipc_stats(struct cuda_ipc_context_t context,
                                 struct cuda_ipc_stats_t *stats);

/**
 * What a status says, in English, such as "the exporter has exited".
 *
 * Never null; "unknown status" for a number that this version does not have. The text is the library's and stays. Usable from any thread, and in a forked child.
 */
const char *cuda_ipc_status_string(cuda_ipc_status_t status);

/**
 * 1 if the same call may succeed later without anybody changing a setting, otherwise 0. Usable from any thread, and in a forked child.
 */
int32_t cuda_ipc_status_is_retryable(cuda_ipc_status_t status);

/**
 * The version of the library that was loaded, as major * 1000000 + minor * 1000 + patch. Usable from any thread, and in a forked child.
 */
uint32_t cuda_ipc_version(void);

/**
 * The same as text, such as "0.1.0". The library's; it stays. Usable from any thread, and in a forked child.
 */
const char *cuda_ipc_version_string(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* CUDA_IPC_H */
