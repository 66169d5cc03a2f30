#!/usr/bin/env bash
# Runs everything of cuda-ipc that needs a GPU, on a machine without Rust: prints a table, and writes results.json, a log for each step, targets.md and plots.
#
#   ./run.sh [--quick] [STEP]...       (--list names the steps)
#
# NIXL steps run where `python3` has torch and nixl; they say so where it has not.
set -u
cd "$(dirname "$0")"
kit=$PWD
out=${CUDA_IPC_KIT_OUT:-$kit/results}
quick=
wanted=()
for argument in "$@"; do
    case $argument in
        --quick) quick=1 ;;
        --list) list=1 ;;
        -*) echo "usage: ./run.sh [--quick] [--list] [STEP]..." >&2; exit 64 ;;
        *) wanted+=("$argument") ;;
    esac
done
program=$kit/bin/cuda-ipc
has_nixl() { python3 -c 'import importlib.util as u, sys; sys.exit(not (u.find_spec("torch") and any(u.find_spec(n) for n in ("nixl_cu13", "nixl_cu12", "nixl"))))' 2>/dev/null; }
reps=${quick:+10}
reps=${reps:-60}

# name, seconds at most, command. A JSON object on standard output goes into results.json; otherwise the last line does.
steps() {
    cat <<LIST
doctor 60 $program doctor --json
conformance 120 $kit/bin/conformance --test-threads=1
demo-1 60 $program demo --chunks 1
demo-26 60 $program demo --chunks 26
demo-400 60 $program demo --chunks 400
demo-broker 60 $program demo --chunks 26 --route broker
demo-pool 60 $program demo --kind pool
demo-malloc 60 $program demo --kind malloc
import 200 $program bench import --chunks 1,26,400 --reps $reps --json
broker 200 $program bench broker --chunks 1,26,400 --reps $reps --json
parts 60 $program bench parts --json
export 120 $program bench export --chunks 1,26,400 --reps $((reps / 2)) --json
growth 120 $program bench growth --chunks 1,100,2000 --json
give-back 120 $program bench give-back --size 8G --json
bandwidth 120 $program bench bandwidth --json
cache 200 $program bench cache --windows 100,10000 --json
LIST
    if has_nixl; then
        cat <<LIST
nixl 300 $program run --library $kit/lib/libcuda_ipc_preload.so -- python3 -W ignore $kit/bench/nixl_bench.py --bytes 512M,4G --pairs $reps
nixl-control 200 python3 -W ignore $kit/bench/nixl_bench.py --bytes 512M --pairs 4 --rounds 2
nixl-life 120 $program run --library $kit/lib/libcuda_ipc_preload.so -- python3 -W ignore $kit/bench/nixl_life.py
nixl-life-control 120 python3 -W ignore $kit/bench/nixl_life.py
LIST
    fi
}

if [ -n "${list:-}" ]; then
    steps | cut -d' ' -f1
    exit 0
fi
has_nixl || echo "python3 has no torch with nixl: the NIXL steps are left out" >&2
rm -rf "$out"
mkdir -p "$out"
# The control needs it as much as `cuda-ipc run` sets it: without NVLink UCX reads nothing by cuda_ipc.
export UCX_CUDA_IPC_ENABLE_GET_ZCOPY=${UCX_CUDA_IPC_ENABLE_GET_ZCOPY:-y} NIXL_LOG_LEVEL=${NIXL_LOG_LEVEL:-error}
failed=0
separator=
printf '{"date": "%s", "kernel": "%s", "steps": [' "$(date -u +%FT%TZ)" "$(uname -r)" >"$out/results.json"
printf '%-18s %-8s %8s  %s\n' step verdict seconds "last line"
while read -r name limit command; do
    if [ ${#wanted[@]} -gt 0 ] && [[ " ${wanted[*]} " != *" $name "* ]]; then
        continue
    fi
    start=$(date +%s.%N)
    timeout "$limit" $command >"$out/$name.log" 2>"$out/$name.err" </dev/null
    status=$?
    seconds=$(awk "BEGIN { printf \"%.1f\", $(date +%s.%N) - $start }")
    verdict=passed
    [ $status -eq 0 ] || { verdict="rc=$status"; failed=$((failed + 1)); }
    last=$(grep -v '^$' "$out/$name.log" | tail -n 1)
    [[ $command == *--json* ]] && last="(results.json)"
    [ $status -eq 0 ] || last=$(tail -n 1 "$out/$name.err")
    printf '%-18s %-8s %8s  %s\n' "$name" "$verdict" "$seconds" "${last:0:300}"
    if [[ $command == *--json* ]] && [ $status -eq 0 ]; then
        body=$(cat "$out/$name.log")
    else
        body="\"$(grep -v '^$' "$out/$name.log" | grep -E 'RESULT|result:|GB/s|in use' | tail -n 12 | sed 's/\\/\\\\/g; s/"/\\"/g' | tr '\n' ';')\""
    fi
    printf '%s{"name": "%s", "status": %d, "seconds": %s, "result": %s}' "$separator" "$name" "$status" "$seconds" "${body:-null}" >>"$out/results.json"
    separator=", "
done < <(steps)
printf ']}\n' >>"$out/results.json"
python3 "$kit/bench/targets.py" "$out/results.json" >"$out/targets.md" 2>>"$out/targets.err" && cat "$out/targets.md"
"$program" bench plot "$out/results.json" --svg "$out/svg" 2>>"$out/plots.err"
echo "$failed steps failed; $out/results.json"
[ $failed -eq 0 ]
