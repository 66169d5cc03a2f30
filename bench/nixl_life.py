#!/usr/bin/env python3
"""The life of expandable-segment memory under NIXL: many tensors, growth, freeing, other memory at old addresses, neighbours; every byte checked.

After each free it says how much GPU memory is in use 500 ms later: run it with and without the preload library and compare.

    cuda-ipc run -- python3 nixl_life.py [--soak SECONDS]
"""

import argparse
import gc
import time

import torch

from nixl_target import Remote, allocate, free_memory, nixl_api, process_state, wait_done, wrong_words

MIB = 1 << 20


class Reader:
    """Reads tensors of the target into memory of its own."""

    def __init__(self, remote, size):
        self.remote = remote
        self.local = allocate("default", size)
        self.agent = nixl_api().nixl_agent(f"reader-{time.monotonic_ns()}")
        self.registration = self.agent.register_memory([self.local])
        self.peer = None

    def end(self):
        self.agent.remove_remote_agent(self.peer)
        self.agent.deregister_memory(self.registration)
        self.agent = self.local = None

    def connect(self, metadata, anew=False):
        """Takes the target's metadata; `anew` forgets what is known of it, which NIXL wants when registrations have gone."""
        if anew:
            self.agent.remove_remote_agent(self.peer)
        self.peer = self.agent.add_remote_agent(metadata)

    def transfer(self, operation, names, sizes):
        """One transfer between the named tensors and consecutive parts of the local memory; returns seconds."""
        parts, at = [], 0
        for size in sizes:
            parts.append(self.local[at // 4 : (at + size) // 4])
            at += size
        theirs = self.agent.deserialize_descs(self.remote.descriptors(names))
        handle = self.agent.initialize_xfer(operation, self.agent.get_xfer_descs(parts), theirs, self.peer)
        start = time.perf_counter()
        state = self.agent.transfer(handle)
        if state == "PROC":
            state = wait_done(self.agent, handle)
        taken = time.perf_counter() - start
        self.agent.release_xfer_handle(handle)
        if state != "DONE":
            raise SystemExit(f"{operation} ended as {state}")
        return taken, parts

    def read(self, names, sizes, seeds):
        """Reads, compares, and returns (wrong words, GB/s)."""
        self.local.zero_()
        torch.cuda.synchronize()
        taken, parts = self.transfer("READ", names, sizes)
        wrong = sum(wrong_words(part, seed) for part, seed in zip(parts, seeds))
        return wrong, sum(sizes) / taken / 1e9


class Report:
    def __init__(self):
        self.failed = 0
        torch.cuda.empty_cache()
        self.start = free_memory()

    def read(self, what, wrong, rate):
        self.failed += wrong != 0
        print(f"{what:58} {'right' if wrong == 0 else f'{wrong} WRONG WORDS':>16} {rate:9.1f} GB/s", flush=True)

    def in_use(self, what):
        time.sleep(0.5)
        torch.cuda.empty_cache()
        print(f"{what:58} {(self.start - free_memory()) / MIB:12.0f} MiB in use after 500 ms", flush=True)


def life(remote, report):
    reader = Reader(remote, 2048 * MIB)
    report.start = free_memory()

    names, size = [f"t{number}" for number in range(100)], 16 * MIB
    old = {name: remote.allocate(name, "expandable", size, number) for number, name in enumerate(names)}
    for name in names:
        metadata = remote.register([name])
    reader.connect(metadata)
    report.read("100 tensors of 16 MiB, registered one by one, one transfer", *reader.read(names, [size] * 100, range(100)))

    remote.allocate("grown", "expandable", 1024 * MIB, 500)
    reader.connect(remote.register(["grown"]))
    report.read("growth by 1 GiB, old and new in one transfer", *reader.read(names[:40] + ["grown"], [size] * 40 + [1024 * MIB], [*range(40), 500]))

    remote.deregister(["grown", *names[1::2]])
    remote.free(["grown", *names[1::2]])
    remote.empty_cache()
    report.in_use("every second tensor and the 1 GiB freed")
    report.read("the neighbours, by their old registration", *reader.read(names[::2], [size] * 50, range(0, 100, 2)))

    remote.deregister(names[::2])
    remote.free(names[::2])
    remote.empty_cache()
    report.in_use("everything freed")

    again = {name: remote.allocate(name, "expandable", size, number + 1000) for number, name in enumerate(names)}
    same = sum(old[name] == again[name] for name in names)
    for name in names:
        metadata = remote.register([name])
    reader.connect(metadata, anew=True)
    report.read(f"other contents, {same} of 100 at their old addresses", *reader.read(names, [size] * 100, range(1000, 1100)))

    torch.arange(reader.local.numel(), dtype=torch.int32, device="cuda", out=reader.local)
    for number, name in enumerate(names):
        part = reader.local[number * size // 4 : (number + 1) * size // 4]
        part.copy_(torch.arange(size // 4, dtype=torch.int32, device="cuda").mul_(-1640531535).add_((number + 2000) * 40503 + 1))
    torch.cuda.synchronize()
    taken, _ = reader.transfer("WRITE", names, [size] * 100)
    report.read("WRITE into 100 tensors", sum(remote.wrong_words(name, number + 2000) for number, name in enumerate(names)), 100 * size / taken / 1e9)

    remote.deregister(names)
    remote.free(names)
    remote.empty_cache()
    report.in_use("everything freed again")


# NIXL keeps a connection open for each time that a peer was forgotten and met again, until the agent ends: so agents are made anew after that many rounds.
ROUNDS_OF_AN_AGENT = 50


def soak(remote, report, seconds, kind):
    """Allocate, register, transfer, deregister, free, give back; counters after a minute against those at the end."""
    start, first, told, rounds, wrong = time.monotonic(), None, 0, 0, 0
    while time.monotonic() - start < seconds:
        remote.restart_agent()
        reader = Reader(remote, 256 * MIB)
        for _ in range(ROUNDS_OF_AN_AGENT):
            size = (16 + 16 * (rounds % 8)) * MIB
            remote.allocate("soak", kind, size, rounds)
            reader.connect(remote.register(["soak"]), anew=reader.peer is not None)
            wrong += reader.read(["soak"], [size], [rounds])[0]
            remote.deregister(["soak"])
            remote.free(["soak"])
            remote.empty_cache()
            rounds += 1
        reader.end()
        del reader
        gc.collect()
        torch.cuda.empty_cache()
        passed = time.monotonic() - start
        if first is None and passed > min(60, seconds / 4):
            first = counters(remote, rounds)
        if passed - told > 60:
            told = passed
            resident = [state["rss"] / MIB for state in counters(remote, rounds)[:2]]
            print(f"SOAK kind={kind} after {passed:.0f} s, {rounds} rounds: target {resident[0]:.1f} MiB resident, reader {resident[1]:.1f} MiB", flush=True)
    last = counters(remote, rounds)
    report.failed += wrong != 0
    print(f"SOAK kind={kind} seconds={seconds} rounds={rounds} wrong_words={wrong}")
    for name, number in (("target", 0), ("reader", 1)):
        changes = {key: last[number][key] - first[number][key] for key in first[number]}
        print(f"SOAK {name} since round {first[3]}: fds {changes['fds']:+d}, threads {changes['threads']:+d}, resident {changes['rss'] / MIB:+.1f} MiB")
    print(f"SOAK GPU memory in use since round {first[3]}: {(first[2] - last[2]) / MIB:+.1f} MiB", flush=True)


def counters(remote, rounds):
    """Both processes' counters and the GPU's free memory, after everything has been given back."""
    remote.restart_agent()
    time.sleep(0.6)
    return remote.state(), process_state(), free_memory(), rounds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--soak", type=int, metavar="SECONDS", help="instead: one tensor after the other for so long")
    parser.add_argument("--kind", default="expandable", choices=("expandable", "default"), help="memory of the soak")
    options = parser.parse_args()
    torch.ones(1, device="cuda")
    remote, report = Remote(), Report()
    if options.soak:
        soak(remote, report, options.soak, options.kind)
    else:
        life(remote, report)
    print("fds of the target:", remote.state()["fds"], "of the reader:", process_state()["fds"])
    remote.stop()
    raise SystemExit(1 if report.failed else 0)


if __name__ == "__main__":
    main()
