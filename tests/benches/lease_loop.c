/* The loop that the benchmark of the C ABI measures: take a lease and end it, of one window after the other. */
#include "cuda_ipc.h"

/* `order` are places in `windows` and `bases`, one for each lease. Returns how many leases were no hits. */
uint64_t lease_loop(cuda_ipc_status_t (*lease)(cuda_ipc_window_t, uint64_t, uint64_t, uint64_t, cuda_ipc_lease_t *, uint64_t *),
                    cuda_ipc_status_t (*end)(cuda_ipc_lease_t), const cuda_ipc_window_t *windows, const uint64_t *bases, const uint32_t *order,
                    uint64_t count)
{
    uint64_t at, failed = 0;

    for (at = 0; at < count; at++) {
        cuda_ipc_lease_t taken;
        uint64_t local;

        if (lease(windows[order[at]], bases[order[at]] + at % 4096, 64, 0, &taken, &local) != CUDA_IPC_OK) {
            failed++;
            continue;
        }
        failed += end(taken) != CUDA_IPC_OK;
    }
    return failed;
}
