#!/usr/bin/env python3
"""PyTorch's own IPC: what torch.multiprocessing does when a CUDA tensor goes to another process.

The exporting process pickles a tensor with PyTorch's reductions (share), this one unpickles it (open); both are timed. In each round the memory is allocated anew, so
the first open of a round is of memory that nobody knows. Then the tensor is opened once more while it is held, and again after it was let go; and copies out of
opened memory of both kinds are timed in strict turns. Every byte is compared once a round. A step that fails is printed with what PyTorch says, and is the exit status.

    torch_ipc.py --kinds default,expandable --bytes 512M
    torch_ipc.py --kinds expandable --refuse        # without the right to pidfd_getfd, as in a default container
    torch_ipc.py --kinds expandable --bytes 8G --files 256
"""

import os

os.environ.setdefault("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC", "1")

import argparse
import gc
import pickle
import resource
import statistics
import time

import torch
from torch.multiprocessing.reductions import ForkingPickler

from nixl_target import allocate, fill, process_state, wrong_words
from refuse import refuse_pidfd_getfd


def size(text):
    units = {"K": 10, "M": 20, "G": 30}
    return int(text[:-1]) << units[text[-1]] if text[-1] in units else int(text)


class Source:
    """The exporting process: tensors by kind."""

    def __init__(self, files):
        if files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        torch.ones(1, device="cuda")
        self.tensors = {}

    def allocate(self, kind, bytes_, seed):
        # A pool's memory is the allocator's own choice, of the whole process.
        self.tensors[kind] = torch.empty(bytes_ // 4, dtype=torch.int32, device="cuda") if kind == "pool" else allocate(kind, bytes_)
        fill(self.tensors[kind], seed)

    def share(self, kind):
        start = time.perf_counter()
        data = bytes(ForkingPickler.dumps(self.tensors[kind]))
        return data, (time.perf_counter() - start) * 1e6, process_state()["fds"]

    def free(self):
        self.tensors.clear()
        gc.collect()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def serve(pipe, files):
    source = Source(files)
    pipe.send("ready")
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(source, name)(*arguments))
        except Exception as error:
            pipe.send(RuntimeError(str(error)))


class Remote:
    """The other end of `serve`."""

    def __init__(self, files):
        context = torch.multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, files), daemon=True)
        self.process.start()
        theirs.close()
        assert self.pipe.recv() == "ready"

    def __call__(self, name, *arguments):
        self.pipe.send((name, arguments))
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def open_(data):
    torch.cuda.synchronize()
    start = time.perf_counter()
    tensor = pickle.loads(data)
    return tensor, (time.perf_counter() - start) * 1e6


def let_go():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()


class Failed(Exception):
    def __init__(self, step, error):
        text = " ".join(str(error).split())[:300]
        super().__init__(f"step={step!r} error={text!r}")


def attempt(step, function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        raise Failed(step, error) from error


TIMES = ("share_first", "share_again", "open_first", "open_held", "open_again")


def one_round(remote, kinds, bytes_, number, reopens, times, fds):
    """Shares, opens, lets go, opens again; leaves tensors of all kinds open."""
    opened = {}
    for kind in kinds:
        attempt("allocating", remote, "allocate", kind, bytes_, number)
        for name in ("first", "again"):
            data, us, fds[kind] = attempt("sharing", remote, "share", kind)
            if name == "first":
                times[kind]["share_first"].append(us)
                tensor, us = attempt("opening", open_, data)
                times[kind]["open_first"].append(us)
            else:
                times[kind]["share_again"].append(us)
                held, us = attempt("opening what is held", open_, data)
                times[kind]["open_held"].append(us)
                del held
        for _ in range(reopens):
            del tensor
            let_go()
            tensor, us = attempt("opening again", open_, attempt("sharing", remote, "share", kind)[0])
            times[kind]["open_again"].append(us)
        if wrong := wrong_words(tensor, number):
            raise Failed("comparing", f"{wrong} wrong words")
        opened[kind] = tensor
    return opened


def gbps(local, tensor):
    torch.cuda.synchronize()
    start = time.perf_counter()
    local.copy_(tensor)
    torch.cuda.synchronize()
    return tensor.numel() * 4 / (time.perf_counter() - start) / 1e9


def measure(options, kinds):
    remote = Remote(options.files)
    if options.refuse:
        refuse_pidfd_getfd()
    if options.files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (options.files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    times = {kind: {name: [] for name in TIMES} for kind in kinds}
    rates, fds = {kind: [] for kind in kinds}, {}
    local = None
    for number in range(options.rounds):
        opened = one_round(remote, kinds, options.bytes, number, options.reopens, times, fds)
        if local is None:
            local = torch.empty(options.bytes // 4, dtype=torch.int32, device="cuda")
        for _ in range(2 + options.pairs // options.rounds):
            for kind in kinds:
                rates[kind].append(gbps(local, opened[kind]))
        opened.clear()
        let_go()
        remote("free")
    for kind in kinds:
        line = f"RESULT torch kind={kind} bytes={options.bytes} rounds={options.rounds} fds={fds[kind]}"
        line += f" rate={statistics.median(rates[kind]):.1f}GB/s"
        if "default" in kinds:
            ratios = [one / other for one, other in zip(rates[kind], rates["default"])]
            line += f" ratio={statistics.median(ratios):.3f}"
        for name in TIMES:
            values = times[kind][name]
            line += f" {name}={min(values):.0f}/{statistics.median(values):.0f}/{max(values):.0f}us"
        print(line, "verified=true", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="default,expandable", help="default, expandable, pool (of the whole process: PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync)")
    parser.add_argument("--bytes", type=size, default=512 << 20)
    parser.add_argument("--rounds", type=int, default=5, help="how often the memory is allocated anew")
    parser.add_argument("--reopens", type=int, default=5, help="opens after letting go, in each round")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--refuse", action="store_true", help="the opening process may not call pidfd_getfd")
    parser.add_argument("--files", type=int, help="limit of open files of both processes")
    options = parser.parse_args()
    torch.ones(1, device="cuda")
    try:
        measure(options, options.kinds.split(","))
    except Failed as failed:
        print(f"FAILED torch kinds={options.kinds} bytes={options.bytes} {failed}", flush=True)
        raise SystemExit(1) from failed


if __name__ == "__main__":
    main()
