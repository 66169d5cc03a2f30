"""The process whose memory is read and written: allocates tensors, registers them with NIXL, answers commands over a pipe.

Used by nixl_bench.py and nixl_life.py. Commands are (name, arguments) tuples; each has one answer. Tensors have names, and live until `free`.
"""

import gc
import importlib
import os
import statistics
import time

import torch


def nixl_api():
    """The NIXL bindings of whichever CUDA version is installed."""
    for name in ("nixl_cu13", "nixl_cu12", "nixl"):
        try:
            return importlib.import_module(name + "._api")
        except ModuleNotFoundError:
            pass
    raise SystemExit("no NIXL wheel: pip install nixl")


def expandable(on):
    """Memory allocated from now on is (not) of expandable segments."""
    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{on}")


def allocate(kind, size):
    """`size` bytes of the default allocator's ("default") or of an expandable segment's memory ("expandable")."""
    expandable(kind == "expandable")
    try:
        return torch.empty(size // 4, dtype=torch.int32, device="cuda")
    finally:
        expandable(False)


def fill(tensor, seed):
    """Writes a pattern in which every word differs from its neighbours and from the same word under another seed."""
    torch.arange(tensor.numel(), dtype=torch.int32, device="cuda", out=tensor)
    tensor.mul_(-1640531535).add_(seed * 40503 + 1)
    torch.cuda.synchronize()


def wrong_words(tensor, seed):
    """How many words of `tensor` are not what `fill` wrote."""
    expected = torch.empty_like(tensor)
    fill(expected, seed)
    wrong = int((tensor != expected).sum())
    del expected
    return wrong


def free_memory():
    """Free bytes of the GPU."""
    return torch.cuda.mem_get_info()[0]


def wait_done(agent, handle):
    """Waits for a transfer and returns the seconds since `start`; errors are the caller's to see."""
    while True:
        state = agent.check_xfer_state(handle)
        if state != "PROC":
            return state


def process_state():
    """Open fds, threads and resident bytes of this process."""
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"fds": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")), "rss": resident}


class Target:
    def __init__(self):
        # NIXL sees only the CUDA context that exists when it starts.
        torch.ones(1, device="cuda")
        self.agent = nixl_api().nixl_agent("target")
        self.tensors, self.registered = {}, {}

    def restart_agent(self):
        """A new agent in place of the old one, with which its connections end."""
        self.agent = None
        gc.collect()
        self.agent = nixl_api().nixl_agent(f"target-{time.monotonic_ns()}")

    def allocate(self, name, kind, size, seed):
        self.tensors[name] = allocate(kind, size)
        fill(self.tensors[name], seed)
        return self.tensors[name].data_ptr()

    def register(self, names):
        for name in names:
            self.registered[name] = self.agent.register_memory([self.tensors[name]])
        return self.agent.get_agent_metadata()

    def deregister(self, names):
        for name in names:
            self.agent.deregister_memory(self.registered.pop(name))
        return self.agent.get_agent_metadata()

    def descriptors(self, names):
        return self.agent.get_serialized_descs(self.agent.get_xfer_descs([self.tensors[name] for name in names]))

    def fill(self, name, seed):
        fill(self.tensors[name], seed)

    def wrong_words(self, name, seed):
        return wrong_words(self.tensors[name], seed)

    def free(self, names):
        for name in names:
            del self.tensors[name]

    def empty_cache(self):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return time.monotonic()

    def free_memory(self):
        return free_memory()

    def state(self):
        return process_state()

    def local_seconds(self, name, copies=15):
        """Seconds of one copy out of a tensor within this process, waited for by itself as a transfer is; the median."""
        source = self.tensors[name]
        target = allocate("default", source.numel() * 4)
        taken = []
        for _ in range(copies):
            torch.cuda.synchronize()
            start = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)


def serve(pipe):
    """Answers commands until the pipe ends."""
    target = Target()
    pipe.send("ready")
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(target, name)(*arguments))
        except Exception as error:
            pipe.send(error)


class Remote:
    """The other end of `serve`: calls become commands. Starts the process."""

    def __init__(self):
        import multiprocessing

        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        assert self.pipe.recv() == "ready"

    def __getattr__(self, name):
        def call(*arguments):
            self.pipe.send((name, arguments))
            answer = self.pipe.recv()
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    def stop(self):
        self.pipe.close()
        self.process.join(20)
