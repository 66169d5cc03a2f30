#!/usr/bin/env python3
"""Every way to read another process's memory on one GPU, side by side in one run: PyTorch's own IPC, NIXL, UCX, and this project.

Each stack is called as its user would, by a program of its own, under a time limit. One table: what each does with memory of expandable segments (or chunks as they
have, 26 of 20 MiB), with pools, without the right to pidfd_getfd, and with few open files. What cannot do a case says "fails" or "slow path", with what it said.
Ratios are against memory of the default allocator in the same program's run. --json FILE is for `cuda-ipc bench plot`.

    peers.py --program cuda-ipc --library libcuda_ipc_preload.so [--also 'UCX 1.22, patched=COMMAND']... [--only WORD] [--json FILE]

COMMAND of --also is a program that prints RESULT lines like ucx_bench.py, a row for each.
"""

import argparse
import json
import os
import platform
import re
import resource
import shlex
import subprocess
import sys

from refuse import refuse_pidfd_getfd

HERE = os.path.dirname(os.path.abspath(__file__))
# Of the default allocator's memory in the same run. Below SLOW the bytes have not gone by the GPU's own memory.
FULL, SLOW = 0.9, 0.1


def python(script, *arguments):
    return [sys.executable, "-W", "ignore", os.path.join(HERE, script), *arguments]


def few_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


def run(command, seconds, environment=(), before=None):
    """Exit status, output, and the last line that was said before the end."""
    try:
        done = subprocess.run(
            command, env={**os.environ, **dict(environment)}, timeout=seconds, capture_output=True, text=True, preexec_fn=before, check=False
        )
    except subprocess.TimeoutExpired as late:
        return 124, (late.stdout or b"").decode(errors="replace"), f"no end within {seconds} s"
    except OSError as error:
        return 127, "", str(error)
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith("FAILED") or "rror" in line]
    return done.returncode, done.stdout, (failed or lines or ["no word"])[-1].strip()[:300]


def fields(line):
    return dict(re.findall(r"(\w+)=([^ ]+)", line))


def number(text):
    """The middle of min/median/max, without its unit."""
    parts = re.sub(r"(GB/s|us)$", "", text).split("/")
    return float(parts[len(parts) // 2])


def row(name, **figures):
    gbps, ratio = figures.get("gbps"), figures.get("ratio")
    verdict = "fails" if gbps is None else "works" if ratio is None else "full speed" if ratio > FULL else "slow path" if ratio < SLOW else "slower"
    return {"name": name, "verdict": verdict, **figures}


def failed(name, status, said):
    return [row(name, evidence=f"exit {status}: {said}")]


def torch(name, *arguments, environment=()):
    status, out, said = run(python("torch_ipc.py", *arguments), 90, environment)
    if status:
        return failed(name, status, said)
    rows = []
    for found in map(fields, (line for line in out.splitlines() if line.startswith("RESULT"))):
        figures = {"gbps": number(found["rate"]), "share_us": number(found["share_first"]), "open_us": number(found["open_first"])}
        if "ratio" in found:
            figures["ratio"] = number(found["ratio"])
        figures["reopen_us"], figures["evidence"] = number(found["open_again"]), f"{found['fds']} fds open in the exporter"
        rows.append(row(f"{name}, {found['kind']}", **figures))
    return rows


def results(name, command, seconds, environment=(), before=None):
    """Rows of a program that compares default memory with another kind in RESULT lines."""
    status, out, said = run(command, seconds, environment, before)
    rows = []
    for line in (line for line in out.splitlines() if line.startswith("RESULT")):
        found = fields(line)
        rate = found.get("expandable") or found.get("kind") or found.get("rate")
        if rate is None or "ratio" not in found:
            continue
        words = " ".join(word for word in line.split()[1:] if "=" not in word)
        evidence = f"default memory {found.get('default', '?')}; {found.get('quartiles', '')}"
        rows.append(row(f"{name}, {words}", gbps=number(rate), ratio=number(found["ratio"]), evidence=evidence))
    return rows + failed(name, status, said) if status or not rows else rows


def report(program, seconds, *arguments):
    status, out, said = run([program, "bench", *arguments, "--json"], seconds)
    if status:
        raise RuntimeError(f"bench {arguments[0]} ended with {status}: {said}")
    return json.loads(out)


def crates(program):
    """This project's crates, on chunks of 2 and 20 MiB as PyTorch makes them, and on a pool."""
    try:
        copies = report(program, 60, "bandwidth", "--kinds", "vmm,pool", "--chunks", "26", "--reps", "30")["rows"]
        opening = report(program, 60, "import", "--cache", "--chunks", "26", "--reps", "30")["rows"][0]
        sharing = report(program, 60, "export", "--chunks", "26", "--reps", "20")["rows"][0]
        parts = report(program, 60, "parts", "--parts", "1000", "--size", "512M")
    except (RuntimeError, ValueError) as error:
        return failed("cuda-ipc crates", 1, str(error))
    rows = []
    for found in copies:
        gbps = found["gbps"]
        figures = {"gbps": gbps["ours"]["median"], "ratio": gbps["median_of_pair_ratios"]}
        if found["kind"] == "vmm":
            figures["share_us"] = sharing["export"]["median"]
            figures["open_us"] = opening["cached"]["import"]["ours"]["median"]
            figures["reopen_us"] = parts["leases"]["again"]["open"]["median"] + parts["leases"]["again"]["lease"]["median"]
            figures["evidence"] = "opened again: decoded, opened and leased, the window known"
        rows.append(row(f"cuda-ipc crates, {found['kind']}", **figures))
    return rows


def demo(name, program, *arguments, before=None):
    status, out, said = run([program, "demo", "--json", *arguments], 60, before=before)
    if status:
        return failed(name, status, said)
    found = json.loads(out)
    return [row(name, gbps=found["gbps"], open_us=found["import_us"], evidence=f"route {found['route']}, verified {str(found['verified']).lower()}")]


def cases(options):
    program, with_library = options.program, [options.program, "run"]
    if options.library:
        with_library += ["--library", options.library]
    with_library.append("--")
    get = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y", "NIXL_LOG_LEVEL": "error"}
    nixl = python("nixl_bench.py", "--bytes", "512M", "--operations", "READ")
    listed = [
        ("PyTorch IPC", lambda name: torch(name, "--kinds", "default,expandable")),
        ("PyTorch IPC without pidfd_getfd", lambda name: torch(name, "--kinds", "expandable", "--refuse", "--rounds", "1")),
        ("PyTorch IPC of 8 GiB, 256 open files", lambda name: torch(name, "--kinds", "expandable", "--bytes", "8G", "--files", "256", "--rounds", "1")),
        ("PyTorch IPC of a pool", lambda name: torch(name, "--kinds", "pool", environment={"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"})),
        ("NIXL as it is", lambda name: results(name, [*nixl, "--pairs", "4", "--rounds", "2"], 90, get)),
        ("NIXL with cuda-ipc's preload", lambda name: results(name, [*with_library, *nixl, "--pairs", "30", "--rounds", "3"], 90, get)),
        ("cuda-ipc crates", lambda name: crates(program)),
        ("cuda-ipc without pidfd_getfd", lambda name: demo(name, program, "--chunks", "26", before=refuse_pidfd_getfd)),
        ("cuda-ipc of 8 GiB, 256 open files", lambda name: demo(name, program, "--chunks", "410", "--size", "8G", before=few_files)),
    ]
    for also in options.also:
        name, _, command = also.partition("=")
        listed.append((name, lambda name, command=command: results(name, shlex.split(command), 120, get)))
    return [(name, case) for name, case in listed if options.only in name]


def machine(program):
    """What the plots say about the machine, as the program sees it."""
    try:
        found = report(program, 60, "export", "--chunks", "1", "--reps", "1")
    except (RuntimeError, ValueError):
        return {"kernel": platform.release()}
    return {key: found[key] for key in ("gpu", "driver", "driver_version", "cuda_version", "kernel", "cpu", "program")}


def show(rows):
    header = ["who", "verdict", "GB/s", "over default", "share us", "first open us", "open again us", "evidence"]
    keys = [("gbps", 1), ("ratio", 3), ("share_us", 0), ("open_us", 0), ("reopen_us", 1)]
    cells = [header]
    for one in rows:
        figures = ["-" if one.get(key) is None else f"{one[key]:.{digits}f}" for key, digits in keys]
        cells.append([one["name"], one["verdict"], *figures, one.get("evidence", "")])
    widths = [max(len(line[column]) for line in cells) for column in range(len(header) - 1)]
    for at, line in enumerate(cells):
        print("| " + " | ".join([*(cell.ljust(width) for cell, width in zip(line, widths)), line[-1]]) + " |")
        if at == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|---|")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="cuda-ipc")
    parser.add_argument("--library", help="the preload library, where it is not beside the program")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--only", default="", metavar="WORD", help="cases with this word in their names")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    rows = []
    for name, case in cases(options):
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows += case(name)
    show(rows)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"bench": "peers", **machine(options.program), "rows": rows}, file)


if __name__ == "__main__":
    main()
