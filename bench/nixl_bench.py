#!/usr/bin/env python3
"""One-sided READ and WRITE of expandable-segment memory against memory of PyTorch's default allocator, by NIXL, between two processes on one GPU.

The two kinds take strict turns, since a transfer that follows one on the same stream of UCX is slower than one that follows another stream's, with stock UCX
too: so each kind always follows the other. In each round all memory is allocated anew. Prints one line for each size and operation: medians, the median of the
pair ratios and their spread, and the same ratio for single copies within the owning process, which no transport can beat.

    cuda-ipc run -- python3 nixl_bench.py --bytes 512M,4G --pairs 30
    python3 nixl_bench.py ...                                          # the control
"""

import argparse
import statistics
import time

import torch

from nixl_target import Remote, allocate, fill, nixl_api, wait_done, wrong_words

KINDS = ("default", "expandable")


def size(text):
    units = {"K": 10, "M": 20, "G": 30}
    return int(text[:-1]) << units[text[-1]] if text[-1] in units else int(text)


class Round:
    """A fresh source of either kind, registered; and a local tensor to read into and write from."""

    def __init__(self, remote, bytes_, local_kind, number, null):
        self.remote, self.bytes, self.number = remote, bytes_, number
        for kind in KINDS:
            remote.allocate(kind, "default" if null else kind, bytes_, number)
        self.local = allocate(local_kind, bytes_)
        self.agent = nixl_api().nixl_agent(f"initiator-{number}-{time.monotonic_ns()}")
        self.registration = self.agent.register_memory([self.local])
        self.peer = self.agent.add_remote_agent(remote.register(list(KINDS)))
        self.descriptors = self.agent.get_xfer_descs([self.local])
        self.handles = {}
        for kind in KINDS:
            theirs = self.agent.deserialize_descs(remote.descriptors([kind]))
            for operation in ("READ", "WRITE"):
                self.handles[operation, kind] = self.agent.initialize_xfer(operation, self.descriptors, theirs, self.peer)

    def seconds(self, operation, kind):
        handle = self.handles[operation, kind]
        start = time.perf_counter()
        state = self.agent.transfer(handle)
        if state == "PROC":
            state = wait_done(self.agent, handle)
        taken = time.perf_counter() - start
        if state != "DONE":
            raise SystemExit(f"{operation} of {kind} memory ended as {state}")
        return taken

    def verify(self, operation, kind):
        """One transfer with every byte checked."""
        if operation == "READ":
            self.local.zero_()
            self.remote.fill(kind, self.number + 7)
            torch.cuda.synchronize()
            self.seconds(operation, kind)
            return wrong_words(self.local, self.number + 7)
        fill(self.local, self.number + 11)
        self.seconds(operation, kind)
        return self.remote.wrong_words(kind, self.number + 11)

    def end(self):
        for handle in self.handles.values():
            self.agent.release_xfer_handle(handle)
        self.agent.remove_remote_agent(self.peer)
        self.agent.deregister_memory(self.registration)
        self.remote.deregister(list(KINDS))
        self.remote.free(list(KINDS))
        self.remote.empty_cache()
        del self.local
        torch.cuda.empty_cache()


def measure(remote, operation, bytes_, pairs, rounds, local_kind, null, each):
    ratios, rates, floors, wrong = [], {kind: [] for kind in KINDS}, [], 0
    for number in range(rounds):
        round_ = Round(remote, bytes_, local_kind, number, null)
        for kind in KINDS:
            wrong += round_.verify(operation, kind)
            round_.seconds(operation, kind)
        for _ in range(-(-pairs // rounds)):
            taken = {kind: round_.seconds(operation, kind) for kind in KINDS}
            ratios.append(taken["default"] / taken["expandable"])
            for kind in KINDS:
                rates[kind].append(bytes_ / taken[kind] / 1e9)
        for kind in KINDS:
            wrong += round_.verify(operation, kind)
        local = {kind: remote.local_seconds(kind) for kind in KINDS}
        floors.append(local["default"] / local["expandable"])
        if each:
            here = {kind: statistics.median(rates[kind][-(-(-pairs // rounds)) :]) for kind in KINDS}
            print(
                f"round {number}: default {here['default']:.0f} GB/s, expandable {here['expandable']:.0f}; within one process "
                f"{bytes_ / local['default'] / 1e9:.0f}, {bytes_ / local['expandable'] / 1e9:.0f}"
            )
        round_.end()
    quartiles = statistics.quantiles(ratios, n=4)
    print(
        f"RESULT {operation} bytes={bytes_} pairs={len(ratios)} rounds={rounds} local={local_kind} "
        f"default={statistics.median(rates['default']):.1f}GB/s expandable={statistics.median(rates['expandable']):.1f}GB/s "
        f"ratio={statistics.median(ratios):.3f} quartiles={quartiles[0]:.3f}..{quartiles[2]:.3f} spread={min(ratios):.3f}..{max(ratios):.3f} "
        f"within_one_process={statistics.median(floors):.3f} ({min(floors):.3f}..{max(floors):.3f}) wrong_words={wrong}",
        flush=True,
    )
    return wrong == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", default="512M", help="sizes, as 512M,4G")
    parser.add_argument("--operations", default="READ,WRITE")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5, help="how often all memory is allocated anew")
    parser.add_argument("--local", default="default", choices=KINDS, help="memory of the process that reads and writes")
    parser.add_argument("--null", action="store_true", help="both sources of the default allocator: what the method itself shows")
    parser.add_argument("--each", action="store_true", help="also print the medians of each round")
    options = parser.parse_args()
    torch.ones(1, device="cuda")
    remote = Remote()
    results = [
        measure(remote, operation, size(bytes_), options.pairs, options.rounds, options.local, options.null, options.each)
        for bytes_ in options.bytes.split(",")
        for operation in options.operations.split(",")
    ]
    remote.stop()
    raise SystemExit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
