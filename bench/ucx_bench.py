#!/usr/bin/env python3
"""Transfers of ucp_get and ucp_put from memory of cuMemCreate and of pools against memory of cuMemAlloc, between two processes on one GPU.

Both processes are the `player` of tests/ucx/player, linked with the UCX that is measured; this program tells them what to do. A source is `vmm:COUNTxSIZE`, that is
COUNT chunks of SIZE with a POSIX file descriptor, or `pool:SIZE`, or `malloc:SIZE`, which shows what the method itself shows. Each is compared with as much memory of cuMemAlloc in the same process: first every byte of one
transfer of either; then pairs in strict turns, so that each kind always follows the other; then every byte that the last pair has left. One line for each source
and operation, with the same ratio for copies within the exporting process, which no transport can beat; the exit status is 1 if a byte was wrong or a route was not
the one asked for.

    ucx_bench.py --name 1.22.0 --player 'env LD_LIBRARY_PATH=... player' --sources vmm:26x2M,pool:256M --pairs 60 --route cuda_ipc
    ucx_bench.py ... --peer 'env LD_LIBRARY_PATH=OTHER player' --pairs 0      # another UCX at the exporter's end, bytes and routes only
"""

import argparse
import shlex
import statistics
import subprocess

POSIX_FD = 1
WAIT_MS = 60000


def size(text):
    units = {"K": 10, "M": 20, "G": 30}
    return int(text[:-1]) << units[text[-1]] if text[-1] in units else int(text)


class Player:
    """One process: a command is a line, its answer too."""

    def __init__(self, command, name):
        self.name = name
        self.process = subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ask("open", 0)

    def ask(self, *words):
        self.process.stdin.write(" ".join(str(word) for word in words) + "\n")
        self.process.stdin.flush()
        kind, _, rest = self.process.stdout.readline().rstrip("\n").partition(" ")
        if kind != "ok":
            raise SystemExit(f"{self.name}: {words[0]}: {kind} {rest}")
        return rest

    def address(self, *words):
        return self.ask(*words).split()[0]

    def wrong(self, address, bytes_, seed):
        return int(self.ask("check", address, bytes_, seed, 0).split()[0])


class Source:
    """Registered memory of the exporter, and its key as the importer has it. UCX cannot tell the type of a pool's memory, so it is said."""

    def __init__(self, exporter, importer, endpoint, address, bytes_):
        self.exporter, self.importer, self.address, self.bytes = exporter, importer, address, bytes_
        self.memory = exporter.ask("register", address, bytes_, 1)
        self.key = importer.ask("unpack", endpoint, exporter.ask("pack", self.memory))

    def end(self):
        self.importer.ask("drop", self.key)
        self.exporter.ask("deregister", self.memory)


class Pair:
    """The two processes, connected."""

    def __init__(self, options):
        self.exporter = Player(options.peer or options.player, "exporter")
        self.importer = Player(options.player, "importer")
        self.endpoint = self.importer.ask("connect", self.exporter.ask("address"), 0)
        self.back = self.exporter.ask("connect", self.importer.ask("address"), 0)

    def source(self, address, bytes_):
        return Source(self.exporter, self.importer, self.endpoint, address, bytes_)

    def transfer(self, operation, source, local):
        """One transfer; what UCX says of its route."""
        address, bytes_, memory = local
        request, _, route = self.importer.ask(operation, self.endpoint, source.key, source.address, address, bytes_, memory).partition(" ")
        self.importer.ask("wait", request, WAIT_MS)
        if operation == "put":
            self.importer.ask("flush", self.endpoint, WAIT_MS)
        return route

    def turns(self, operation, first, second, local, count):
        address, bytes_, memory = local
        ends = (self.endpoint, first.key, first.address, second.key, second.address)
        return split(self.importer.ask("turns", operation, *ends, address, bytes_, memory, count))


def gets(pair, default, kind, local, pairs):
    """Wrong bytes, routes and times of reads."""
    wrong, routes = 0, []
    for seed, source in enumerate((default, kind), 1):
        pair.exporter.ask("fill", source.address, source.bytes, seed, 0)
        routes.append(pair.transfer("get", source, local))
        wrong += pair.importer.wrong(local[0], source.bytes, seed)
    times = pair.turns("get", default, kind, local, pairs) if pairs else None
    wrong += pair.importer.wrong(local[0], kind.bytes, 2)
    return wrong, routes, times


def puts(pair, default, kind, local, pairs):
    """Wrong bytes, routes and times of writes."""
    pair.importer.ask("fill", local[0], local[1], 3, 0)
    routes = [pair.transfer("put", source, local) for source in (default, kind)]
    wrong = sum(pair.exporter.wrong(source.address, source.bytes, 3) for source in (default, kind))
    times = None
    if pairs:
        pair.importer.ask("fill", local[0], local[1], 4, 0)
        times = pair.turns("put", default, kind, local, pairs)
        wrong += sum(pair.exporter.wrong(source.address, source.bytes, 4) for source in (default, kind))
    return wrong, routes, times


def allocate(exporter, text):
    """The source's address, its bytes, its number of chunks, and the commands that free it."""
    kind, _, rest = text.partition(":")
    if kind != "vmm":
        address = exporter.address("pool", size(rest), POSIX_FD) if kind == "pool" else exporter.address("alloc", size(rest))
        return address, size(rest), 1, [("free", address)]
    count, _, each = rest.partition("x")
    count, each = int(count), size(each)
    address = exporter.address("reserve", count * each, 0)
    exporter.ask("chunks", address, each, count, POSIX_FD)
    return address, count * each, count, [("unmap", address, count * each), ("unreserve", address, count * each)]


def split(answer):
    """Times of things in turns."""
    times = [float(word) for word in answer.split()]
    return times[0::2], times[1::2]


def within_one_process(options, exporter, plain, address, bytes_, text):
    """The ratio for copies that no transport has a part in. Also how it is if they are submitted in parts, each longer than the one before."""
    if not options.pairs:
        return None
    there = exporter.address("alloc", bytes_)
    ratios = []
    for part in ["0:1", *options.parts]:
        first, _, growth = part.partition(":")
        shape = (size(first), round(100 * (float(growth) - 1)))
        exporter.ask("copies", plain, address, there, bytes_, 1, *shape)
        times = split(exporter.ask("copies", plain, address, there, bytes_, options.pairs, *shape))
        ratios.append(statistics.median(one / other for one, other in zip(*times)))
    exporter.ask("free", there)
    if options.parts:
        print(f"PARTS {options.name} {text}", *(f"{part}={ratio:.3f}" for part, ratio in zip(["whole", *options.parts], ratios)), flush=True)
    return ratios[0]


def report(options, operation, text, bytes_, chunks, floor, outcome):
    wrong, routes, times = outcome
    line = f"RESULT {options.name} {operation} {text} chunks={chunks} bytes={bytes_}"
    if times:
        ratios = [first / second for first, second in zip(*times)]
        rates = [bytes_ / statistics.median(one) / 1e3 for one in times]
        quartiles = statistics.quantiles(ratios, n=4)
        line += f" pairs={len(ratios)} default={rates[0]:.1f}GB/s kind={rates[1]:.1f}GB/s ratio={statistics.median(ratios):.3f}"
        line += f" quartiles={quartiles[0]:.3f}..{quartiles[2]:.3f} spread={min(ratios):.3f}..{max(ratios):.3f}"
    right = not options.route or options.route in routes[1]
    line += f" verified={'true' if wrong == 0 else f'false({wrong} bytes)'} route={routes[1]!r} default_route={routes[0]!r}"
    print(line if right else f"{line} WRONG_ROUTE", flush=True)
    return wrong == 0 and right


def measure(options, pair, text):
    address, bytes_, chunks, freeing = allocate(pair.exporter, text)
    plain = pair.exporter.address("alloc", bytes_)
    here = pair.importer.address("alloc", bytes_)
    local = (here, bytes_, pair.importer.ask("register", here, bytes_, 1))
    floor = within_one_process(options, pair.exporter, plain, address, bytes_, text)
    default, kind = pair.source(plain, bytes_), pair.source(address, bytes_)
    good = True
    for operation in options.operations.split(","):
        run = gets if operation == "get" else puts
        good &= report(options, operation, text, bytes_, chunks, floor, run(pair, default, kind, local, options.pairs))
    for source in (default, kind):
        source.end()
    pair.importer.ask("deregister", local[2])
    pair.importer.ask("free", here)
    pair.exporter.ask("free", plain)
    for words in freeing:
        pair.exporter.ask(*words)
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="ucx", help="what the lines call it")
    parser.add_argument("--player", required=True, help="the command of the process that reads and writes")
    parser.add_argument("--peer", help="the command of the process whose memory is read and written, if it is another one")
    parser.add_argument("--sources", default="vmm:1x2M,vmm:26x2M,vmm:400x2M,vmm:256x2M,vmm:2048x2M,pool:256M")
    parser.add_argument("--operations", default="get,put")
    parser.add_argument("--pairs", type=int, default=60, help="0: bytes and routes only")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=[], help="shapes of copies to try within one process: FIRST:GROWTH, as 64M:2")
    parser.add_argument("--route", help="what the route of the source has to contain")
    options = parser.parse_args()
    pair = Pair(options)
    results = [measure(options, pair, text) for text in options.sources.split(",")]
    for player in (pair.importer, pair.exporter):
        player.process.stdin.close()
        player.process.wait()
    raise SystemExit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
