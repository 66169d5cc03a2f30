#!/usr/bin/env python3
"""Reads reports of `cuda-ipc bench --json` and `cuda-ipc demo --json`, and logs with RESULT lines of nixl_bench.py, and says for each target what was found and
whether it is met. A target without a report is "not measured". A row that stands in several reports counts in each.

    targets.py FILE...            a table that can be pasted into a document
"""

import json
import re
import sys


def objects(text):
    """The JSON objects of a file, those of a report of several one by one; RESULT lines as objects, too, also where the kit has them in a text."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        if text[at] == "{":
            try:
                found, at = decoder.raw_decode(text, at)
            except json.JSONDecodeError:
                at += 1
                continue
            # Of `bench all`, of the GPU kit's results.json, or of one bench.
            yield from found.get("reports") or [step["result"] for step in found.get("steps", []) if isinstance(step["result"], dict)] or [found]
        else:
            at += 1
    for line in re.findall(r"RESULT [^;\"\n]*", text):
        if "within_one_process" in line:
            yield {"bench": "nixl", "line": line, **dict(re.findall(r"(\w+)=([^ ]+)", line))}


def of(reports, bench):
    return [row for report in reports if report.get("bench") == bench for row in report.get("rows", [report])]


def worst(rows, value, better=max):
    """The worst value, and all of them by number of chunks. Nothing for no rows."""
    values = [(row.get("chunks"), value(row)) for row in rows]
    return better(one for _, one in values), "; ".join(f"{chunks}: {one:.3g}" for chunks, one in values)


def nixl(reports):
    rows = [one for one in reports if one.get("bench") == "nixl" and one["line"].split()[1] == "READ" and int(one["pairs"]) >= 30]
    if rows:
        low = min(float(row["ratio"]) for row in rows)
        yield low, low >= 0.98, "; ".join(f"{int(row['bytes']) >> 20} MiB {row['ratio']} (quartiles {row['quartiles']}, all {row['spread']})" for row in rows)


def imports(reports):
    if rows := of(reports, "import"):
        high, each = worst(rows, lambda row: row["import"]["median_of_pair_ratios"])
        yield high, high <= 1.05, f"median of pair ratios by chunks: {each}"


def contact(reports):
    if rows := of(reports, "import"):
        high, each = worst(rows, lambda row: row["first_contact"]["median"])
        yield high, high <= 100, f"median us by chunks: {each}"


def growth(reports):
    if rows := of(reports, "growth"):
        high, each = worst(rows, lambda row: row["new_chunk"]["ratio_of_medians"])
        _, all_chunks = worst(rows, lambda row: row["all_chunks"]["ratio_of_medians"])
        yield high, high <= 2, f"lease of the new chunk, ratio of medians by chunks: {each} (of all chunks and the new one: {all_chunks})"


def registration(reports):
    if rows := of(reports, "export"):
        high, each = worst(rows, lambda row: row["registration"]["median"])
        yield high, high <= 20, f"16 MiB, median us by chunks: {each}"
    for one in of(reports, "parts"):
        each = one["registration"]["each"]
        yield each["median"], each["median"] <= 20, f"{one['parts']} parts, us: {each['min']:.1f} / {each['median']:.1f} / {each['max']:.1f}"


def hit(reports):
    for one in of(reports, "cache"):
        for row in one["hits"]:
            if row["chunks"] == 1 and row["windows"] == 10_000:
                found = row["handle"]
                yield found["median"], found["median"] <= 40, f"by window, ns: {found['min']:.1f} / {found['median']:.1f} / {found['max']:.1f}"


def threads(reports):
    for one in of(reports, "cache"):
        for row in one["threads"]:
            if row["chunks"] == 1 and row["threads"] == 16:
                found = row["ratio_as_large"]
                yield found["median"], found["median"] >= 0.9, f"{row['windows']} windows: {found['min']:.3f} / {found['median']:.3f} / {found['max']:.3f}"


def many_chunks(reports):
    for one in reports:
        if "verified" in one and one.get("chunks", 0) >= 40_960:
            size = one["bytes"] / 2**30
            yield size, one["verified"] and size >= 79, f"{one['chunks']} chunks, route {one['route']}, verified {one['verified']}, {one['gbps']:.0f} GB/s"


def given_back(ways):
    def rows(reports):
        for row in of(reports, "give-back"):
            if row["way"] in ways:
                back = row["back_ms"]
                yield back["max"], row["within_target"], f"{row['way']}, ms: {back['min']:.1f} / {back['median']:.1f} / {back['max']:.1f}, target {row['target_ms']:.1f}"

    return rows


def broker(reports):
    if rows := [row for row in of(reports, "broker") if row["chunks"] >= 25]:
        high, each = worst(rows, lambda row: row["import"]["median_of_pair_ratios"])
        yield high, high <= 1.3, f"median of pair ratios by chunks: {each}"


TARGETS = [
    ("READ of expandable-segments memory by NIXL over default memory, >= 30 pairs", ">= 0.98", nixl),
    ("import of N chunks over the bare calls", "<= 1.05", imports),
    ("a peer's first import adds", "<= 100 us", contact),
    ("one more chunk in a window of N over a one-chunk import", "<= 2", growth),
    ("registration inside known chunks", "<= 20 us", registration),
    ("lease hit, 10 000 windows, one thread", "<= 40 ns", hit),
    ("16 threads on different windows over private indexes", ">= 0.9", threads),
    ("80 GiB in chunks of 2 MiB under 1024 open files", "lane kept", many_chunks),
    ("memory back after a reported free", "<= 20 ms + unmapping", given_back(["retired"])),
    ("memory back after an unreported free or a death", "<= 500 ms", given_back(["unreported", "killed"])),
    ("import by the broker over import by pidfd, N >= 25", "<= 1.3", broker),
]


def main():
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    reports = []
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            reports += objects(file.read())
    print("| what | target | found | met | in full |\n|---|---|---|---|---|")
    for what, target, rows in TARGETS:
        for found, met, text in list(rows(reports)) or [(None, None, "")]:
            figure = "not measured" if found is None else f"{found:.3g}"
            print(f"| {what} | {target} | {figure} | {'-' if met is None else 'yes' if met else 'NO'} | {text} |")


if __name__ == "__main__":
    main()
