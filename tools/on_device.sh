#!/usr/bin/env bash
# Everything that needs real hardware, in one run: on a Jetson (JetPack 6.1 or newer) or another machine with an NVIDIA GPU,
# TensorRT and nvcc. Builds the plugin and the engine, verifies kernels and engine, measures speed on both engines, reads L2 and DRAM counters
# where the profiler may, and writes one JSON file with everything a reader needs to judge the figures.
#
#   tools/on_device.sh BUNDLE [OUTPUT.json]
#
# Steps that cannot run are recorded with their reason and the rest goes on; the exit code is 1 when a step that ran has failed.
# EDGEKV names the command (default: .venv/bin/edgekv), PYTHON its interpreter, NCU the profiler, DEPTHS what `edgekv bench` measures.
set -u
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
BUNDLE=$1
OUTPUT=${2:-on_device.json}
EDGEKV=${EDGEKV:-.venv/bin/edgekv}
PYTHON=${PYTHON:-.venv/bin/python}
NCU=${NCU:-ncu}
DEPTHS=${DEPTHS:-64,512,1024}
[ -f "$BUNDLE/manifest.json" ] || { echo "$BUNDLE is not a bundle; make one with edgekv export." >&2; exit 2; }
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
FAILED=0

# step NAME OUTPUT-IS-JSON COMMAND...: runs it, keeps output, exit code and seconds for the report.
step() {
  local name=$1 json=$2 begun code
  shift 2
  echo "== $name" >&2
  begun=$(date +%s.%N)
  "$@" >"$WORK/$name.out" 2>"$WORK/$name.err"
  code=$?
  printf '%s\n%s\n%s\n' "$code" "$begun" "$(date +%s.%N)" >"$WORK/$name.meta"
  echo "$json" >"$WORK/$name.json"
  printf '%s\n' "$name" >>"$WORK/order"
  if [ $code -ne 0 ]; then
    FAILED=1
    tail -n 3 "$WORK/$name.err" >&2
  fi
  return $code
}

# skip NAME REASON: recorded, not a failure.
skip() {
  echo "== $1: left out, $2" >&2
  printf '%s' "$2" >"$WORK/$1.skip"
  printf '%s\n' "$1" >>"$WORK/order"
}

step doctor json "$EDGEKV" doctor --json
if step plugin text "$PYTHON" tools/build_plugin.py; then
  if step build text "$EDGEKV" build "$BUNDLE" --force; then
    step verify json "$EDGEKV" verify "$BUNDLE" --json
    step bench_tensorrt json "$EDGEKV" bench "$BUNDLE" --engine tensorrt --depths "$DEPTHS" --json
    if command -v "$NCU" >/dev/null 2>&1; then
      # Orin and Thor have no DRAM counters: reads from DRAM are 32 bytes times the L2's read misses. Evict-last hits show whether the
      # cache's lines stay in L2. Application replay, because kernels update the cache in place.
      step counters text "$NCU" --replay-mode application --csv --kernel-name 'regex:attend|combine|append_rows' --launch-count 300 \
        --metrics lts__t_sectors_op_read_lookup_miss.sum,lts__t_sectors_op_read.sum,lts__t_sectors_evict_last_lookup_hit.sum,lts__t_sectors_evict_last_lookup_miss.sum,gpu__time_duration.sum \
        "$EDGEKV" run "$BUNDLE" --engine tensorrt --prompt "The river" --max-tokens 16 --quiet --ignore-eos
    else
      skip counters "$NCU is not installed (Nsight Compute)"
    fi
  else
    for name in verify bench_tensorrt counters; do skip $name "there is no engine"; done
  fi
else
  for name in build verify bench_tensorrt counters; do skip $name "there is no plugin library"; done
fi
step bench_onnxruntime json "$EDGEKV" bench "$BUNDLE" --depths "$DEPTHS" --json

"$PYTHON" tools/on_device_report.py "$WORK" "$BUNDLE" "$OUTPUT.part" && mv "$OUTPUT.part" "$OUTPUT" || { echo "the report could not be written" >&2; exit 1; }
echo "$OUTPUT"
exit $FAILED
