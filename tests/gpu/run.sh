#!/usr/bin/env bash
# The measurements of RESULTS.md: run.sh PHASE..., one after another; results and logs lie below $DSV4_GPU_DIR.
#   warm      compile what can be compiled many at once
#   one       stock and with the plugin against the plan (two tiny servers on GPU 0)
#   two       32 greedy prompts, stock against the plugin, against itself, and in other batches (the servers of one)
#   three N "NAME..."   decode speed of one request: these deep servers together on GPU N, measured one at a time (17 GB each)
#   four      prefill, decode and the router
#   five      MTP
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
export PYTHONUNBUFFERED=1
dir=${DSV4_GPU_DIR:-/tmp/dsv4-gpu}
out=$dir/results
mkdir -p "$out" "$dir/logs"
say() { echo "$(date +%T) $*" >>"$out/run.log"; }
servers() { python3 tests/gpu/servers.py "$@"; }
up() { # start these, say which came
  servers start "$@"
  for name in "$@"; do
    servers wait "$name" --seconds 420 >>"$out/run.log" 2>&1 || say "$name did not come: $(tail -n 1 "$dir/logs/$name.log" | cut -c 1-200)"
  done
}
measure() { # name, then measure.py's words
  local name=$1
  shift
  say "$name begins"
  timeout 420 python3 tests/gpu/measure.py --out "$out/$name.json" "$@" >"$out/$name.txt" 2>&1 ||
    say "$name failed: $(tail -n 1 "$out/$name.txt" | cut -c 1-200)"
}
while [ $# -gt 0 ]; do
  say "phase $1"
  case $1 in
  warm) servers exec hopper python3 tests/gpu/warm.py >"$dir/logs/warm.log" 2>&1 ;;
  one)
    up stock ours
    for name in stock ours; do measure "info-$name" info "$name"; done
    ;;
  two)
    measure greedy-stock greedy stock &
    measure greedy-ours greedy ours &
    wait
    measure greedy-stock-again greedy stock
    measure compare-ours compare "$out/greedy-stock.json" "$out/greedy-ours.json"
    measure compare-stock compare "$out/greedy-stock.json" "$out/greedy-stock-again.json"
    measure compare-batching compare "$out/greedy-stock.json" "$out/greedy-stock.json" --at-once 1 8
    servers stop ours
    measure info-stock-alone info stock
    servers stop stock
    ;;
  three)
    export DSV4_GPU_ON=$2
    # shellcheck disable=SC2086
    up $3
    for name in $3; do measure "speed-1k-$name" speed "$name" --context 1024; done
    for name in $3; do
      case $name in *-8k) ;; *) measure "speed-60k-$name" speed "$name" --context 60000 ;; esac
    done
    for name in $3; do
      case $name in *-512k) measure "profile-1k-$name" profile "$name" --context 1024 ;; esac
    done
    # shellcheck disable=SC2086
    servers stop $3
    shift 2
    ;;
  four)
    up prefill decode router
    measure pair pair --kill
    servers stop router prefill decode
    ;;
  five)
    up mtp mtp-nan
    measure mtp mtp mtp
    measure mtp-nan mtp mtp-nan
    servers stop mtp mtp-nan
    ;;
  esac
  say "end of $1"
  shift
done
