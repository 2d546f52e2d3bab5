#!/bin/bash
# On a machine with one CUDA device, in the root of this tree: bash benchmarks/gpu_kit/on_device.sh A|B|C [cpu]
#   A: facts, tests/gpu, calibrate, managed runs with a kill and bits compared
#   B: step times beside plain loops with profiles, then the content of `make bench-gpu`
#   C: what is left: runs by mailboxes and with salvage, more step times
# `cpu` runs the same at sizes that say nothing, to see that it works. Every stage has a time-out of its own, and what
# fails ends nothing else. $OUT gets PART.log (all), summary.txt and the runs' profile. Nothing is installed but the
# wheels of dist/gpu-kit (made by `make gpu-kit`), into $SITE; SITE=none takes what the interpreter $PY has.
PART=${1:-A}; DEV=${2:-cuda}
KIT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd); ROOT=$(cd "$KIT/../.." && pwd)
cd "$ROOT" || exit 1
OUT=${OUT:-/tmp/gpu-kit-out}; LIMIT=${LIMIT:-575}; WORK=${WORK:-/tmp/gpu-kit-work}
PY=${PY:-python3}; SITE=${SITE:-/tmp/gpu-kit-site}
mkdir -p "$OUT" "$WORK"
export PYTHONPATH=$SITE:$ROOT PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export OMP_NUM_THREADS=1 MPLBACKEND=Agg MORPH_CACHE_DIR=$WORK/cache MORPH_DATA_DIR=$WORK/data
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$WORK/triton}
begun=$(date +%s); LOG=$OUT/$PART.log
left() { echo $((LIMIT - ($(date +%s) - begun))); }
stage() {  # name, most seconds, lines shown, command..
  local name=$1 most=$2 lines=$3 room; shift 3; room=$(( $(left) - 8 ))
  if [ "$room" -lt 20 ]; then echo "$PART $name: no time left" | tee -a "$OUT/summary.txt"; return; fi
  [ "$most" -lt "$room" ] && room=$most
  local start; start=$(date +%s)
  timeout -k 5 "$room" "$@" > "$WORK/stage.log" 2>&1; local rc=$?
  { echo "######## $PART $name: rc $rc, $(($(date +%s) - start)) s of $room"; cat "$WORK/stage.log"; } >> "$LOG"
  echo "$PART $name: rc $rc, $(($(date +%s) - start)) s of $room" | tee -a "$OUT/summary.txt"
  grep -hE '^(RESULT|PROFILE)' "$WORK/stage.log" | cut -c1-220 | sed 's/^/    /' >> "$OUT/summary.txt"
  tail -n "$lines" "$WORK/stage.log" | cut -c1-220
}
if [ "$SITE" != none ]; then
  "$PY" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" dist/gpu-kit/*.whl || exit 1
fi
if [ "$DEV" = cuda ] && ! "$PY" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  "$PY" -m benchmarks.gpu_kit.facts
  echo "error: torch finds no CUDA device here; \`bash benchmarks/gpu_kit/on_device.sh $PART cpu\` tries the kit without one" >&2
  exit 1
fi
[ "$DEV" = cuda ] && BIG=1 || BIG=
job() { [ -n "$BIG" ] && echo "$KIT/jobs.py:$1" || echo "$KIT/jobs.py:tiny"; }
STDLIB=$ROOT/configs/jobs/$([ -n "$BIG" ] && echo gpt2_stdlib || echo tiny_gpt).py:job
KITMOD=benchmarks.gpu_kit
case $PART in
A)
  stage facts 60 22 "$PY" -m $KITMOD.facts
  stage tests 200 25 "$PY" -m pytest -m gpu tests/gpu -p no:cacheprovider -q --timeout 90 --durations 6
  grep -q ' failed\| error' "$WORK/stage.log" && \
    CUDA_MODULE_LOADING=EAGER stage tests-eager 100 12 "$PY" -m pytest -m gpu tests/gpu -p no:cacheprovider -q --timeout 60 -k "test_links or test_mailboxes"
  stage calibrate 120 12 "$PY" -m morph.cli.main calibrate "$STDLIB" --device "$DEV" --samples 8 -o "$WORK/profile.json" --commit-round
  cp "$WORK/profile.json" "$OUT/profile.json" 2>/dev/null
  stage runs 220 16 "$PY" -m $KITMOD.runs --device "$DEV" --job "$STDLIB" --profile "$WORK/profile.json" --folder "$WORK/runs" one pair killed
  ;;
B)
  for mode in morph plain plain-free; do
    stage "steps-$mode" 100 24 "$PY" -m $KITMOD.steps "$mode" "$(job gpt2_355m)" "$DEV"
  done
  stage bench 330 24 "$PY" -m benchmarks device_speed $([ -n "$BIG" ] || echo --device cpu --tiny)
  ;;
C)
  stage calibrate-bf16 100 4 "$PY" -m morph.cli.main calibrate "$(job bits)" --device "$DEV" --samples 5 -o "$WORK/bits.json"
  stage runs-ipc 150 14 "$PY" -m $KITMOD.runs --device "$DEV" --job "$(job bits)" --profile "$WORK/bits.json" --folder "$WORK/runs2" one pair-ipc killed-ipc
  for variant in gpt2_355m_compiled gpt2_355m_fast gpt2_355m_clipped gpt2_355m_m16; do
    stage "steps-$variant" 90 8 "$PY" -m $KITMOD.steps morph "$(job $variant)" "$DEV"
  done
  stage steps-plain-m16 60 6 "$PY" -m $KITMOD.steps plain "$(job gpt2_355m_m16)" "$DEV"
  stage runs-salvage 170 14 "$PY" -m $KITMOD.runs --device "$DEV" --job "$(job bits)" --profile "$WORK/bits.json" --folder "$WORK/runs3" one salvage
  ;;
esac
echo; cat "$OUT/summary.txt"
