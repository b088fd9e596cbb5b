#!/usr/bin/env bash
# All that the first minutes on a GPU are for, in the order of what is worth most, each step with a time limit and a log.
#
#     benchmarks/gpu_day.sh OUT              # with what gpu_pack.sh has gathered in build/gpu
#
# Wants a machine with a GPU, Python 3.12, jax for CUDA and no package index; compute-sanitizer and ncu for the last
# steps. A step that fails or takes too long is noted, and the next one runs. A step that would not end within MINUTES
# (9) of the start is left to the next call, which goes on where this one was: it knows from build/gpu_day. OUT gets the
# logs of all steps so far, the figures and summary.md, one page. On another machine it goes on where OUT, or a copy of
# it in the pack's folder, says.
#
# BACKEND=emulated rehearses it on host threads. SECONDS_OF_STEPS=n limits every step to n seconds, STEPS names those to
# run, and STATE is another folder than build/gpu_day.
set -uo pipefail
began=$SECONDS
root=$(cd "$(dirname "$0")/.." && pwd)
out=$(realpath -m "${1:?the folder for logs and the summary}")
backend=${BACKEND:-cuda} pack=${PACK:-$root/build/gpu} state=${STATE:-$root/build/gpu_day}
python=${PYTHON:-python3}
steps=${STEPS:-install machine cpp figures quick slow memory_cpp memory_tests profile}
operations="tests/ops/test_operations.py tests/table/test_evict.py tests/training/test_training.py"
kernels='LookupRows|CountNew|EnterNew|MergeGradients|ReadRows|WriteRows'
mkdir -p "$out" "$state"
cd "$root"

# Where the machine's packages are not enough, those of the pack are used, and nothing that is there is changed.
site=$state/site
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
# Tables are beside what JAX takes at its start, and several processes share the GPU. A kernel that is loaded when it is
# first called may wait for the whole device.
export XLA_PYTHON_CLIENT_PREALLOCATE=false CUDA_MODULE_LOADING=EAGER
# Of pytest's plugins those that the suite names: a warning of another one would end it before the first test.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1

limit_of() { # seconds
  case $1 in
    install) echo 30 ;; machine) echo 30 ;; cpp) echo 60 ;; figures) echo 300 ;; quick | slow) echo 240 ;;
    memory_cpp) echo 180 ;; memory_tests) echo 300 ;; profile) echo 180 ;;
  esac
}

install() {
  rm -rf "$site"
  mkdir -p "$site"
  [ "$backend" = cuda ] || return 0
  local missing
  missing=$("$python" - "$pack"/wheels/*.whl <<'PYTHON'
import importlib.metadata as metadata, sys
from pathlib import Path
for path in map(Path, sys.argv[1:]):
    name, version = path.name.split("-")[:2]
    try:
        there = metadata.version(name)
    except metadata.PackageNotFoundError:
        there = ""
    # What the machine has is used, but for kvjax and what it wants newer.
    if not there or name in ("kvjax", "flax", "optax", "orbax_checkpoint") and there != version:
        print(path)
PYTHON
  ) || return
  # shellcheck disable=SC2086 # one word a wheel
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" $missing || return
  "$python" -m pip list 2>/dev/null | grep -iE '^(jax|flax|optax|orbax|numpy|kvjax)'
  ls "$site"
}

machine() {
  nvidia-smi || [ "$backend" != cuda ] || return
  "$python" -c "import jax, kvjax; print(jax.__version__, jax.devices(), kvjax.backends())"
}

cpp() {
  local test=$pack/device_gpu_test
  [ "$backend" = cuda ] || test=${CPP_TEST:-true}
  "$test"
}

figures() {
  local smoke=
  [ "$backend" = cuda ] || smoke=--smoke
  # shellcheck disable=SC2086 # no word for none
  "$python" benchmarks/gpu.py $smoke --json "$state/figures.json"
}

suite() { # pytest's other arguments
  "$python" -m pytest -p xdist -v --backend="$backend" -n "${WORKERS:-8}" --maxfail=200 "$@"
}
quick() { suite ${TESTS:-tests}; }
slow() { suite -m slow ${TESTS:-tests}; }

# JAX's own pool would hide what is out of bounds; the platform's allocator asks CUDA for each array.
sanitize() { # tool and its options, then the command
  XLA_PYTHON_CLIENT_ALLOCATOR=platform KVJAX_TEST_SANITIZED=1 \
    compute-sanitizer --error-exitcode 9 --print-limit 20 "$@"
}
memory_cpp() {
  [ "$backend" = cuda ] || { cpp; return; }
  local failed=0
  timeout --kill-after 5 80 bash -c "$(declare -f sanitize); sanitize --tool memcheck --track-stream-ordered-races all $pack/device_gpu_test" || failed=$?
  timeout --kill-after 5 40 bash -c "$(declare -f sanitize); sanitize --tool initcheck $pack/device_gpu_test" || failed=$?
  timeout --kill-after 5 40 bash -c "$(declare -f sanitize); sanitize --tool synccheck $pack/device_gpu_test" || failed=$?
  return $failed
}
memory_tests() {
  local tests=${TESTS:-$operations} failed=0 options
  [ "$backend" = cuda ] || { suite $tests; return; }
  for options in "memcheck --track-stream-ordered-races all" initcheck synccheck; do
    timeout --kill-after 5 94 bash -c "$(declare -f sanitize); sanitize --target-processes all --tool $options \
      $python -m pytest -p xdist -v -n 0 --backend=cuda $tests" || failed=$?
  done
  return $failed
}

profile() { # the clocks of the machine stay as they are
  [ "$backend" = cuda ] || return 0
  ncu --clock-control none --target-processes all --kernel-name-base demangled \
    --kernel-id "::regex:$kernels:3" \
    --metrics gpu__time_duration.sum,dram__bytes.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,lts__t_sector_hit_rate.pct,sm__warps_active.avg.pct_of_peak_sustained_active,launch__registers_per_thread \
    "$python" benchmarks/gpu.py --only kernels
}

note() { # step, result, seconds
  sed -i "/^$1\t/d" "$state/steps"
  printf '%s\t%s\t%s\n' "$1" "$2" "$3" >>"$state/steps"
}
run() { # a step, in a shell of its own that ends with its limit
  local limit log=$state/$1.log start=$SECONDS code
  limit=$(limit_of "$1")
  limit=${SECONDS_OF_STEPS:-$limit}
  if [ "$ran" -gt 0 ] && ((SECONDS - began + limit > ${MINUTES:-9} * 60)); then return 1; fi
  ran=$((ran + 1))
  export began root out backend pack state python site operations kernels
  # An interrupted pytest still says what has failed.
  timeout --signal INT --kill-after 10 "$limit" bash -uo pipefail -c \
    "$(declare -f "$1" suite sanitize cpp); $1" >"$log" 2>&1
  code=$?
  case $code in 0) note "$1" passed $((SECONDS - start)) ;; 124 | 137) note "$1" "stopped after $limit s" $((SECONDS - start)) ;;
    *) note "$1" "failed ($code)" $((SECONDS - start)) ;; esac
}

summary() {
  local left=$1 commit packed
  commit=$(git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)
  packed=$(cat "$pack/commit" 2>/dev/null || echo unknown)
  echo "# $(date -u +%Y-%m-%d), commit $commit, pack of $packed, backend $backend"
  echo
  [ "$backend" != cuda ] || [ "$commit" = "$packed" ] ||
    printf 'WARNING: what is installed is of commit %s, and tests and benchmarks are of %s.\n\n' "$packed" "$commit"
  grep -m 1 -oE 'NVIDIA [A-Z0-9][^|]*[^ |]' "$state/machine.log" 2>/dev/null
  tail -n 1 "$state/machine.log" 2>/dev/null
  printf '\n| step | result | seconds |\n|---|---|---|\n'
  while IFS=$'\t' read -r step result seconds; do echo "| $step | $result | $seconds |"; done <"$state/steps"
  [ -z "$left" ] || printf '\nNot yet run:%s. Call it again.\n' "$left"
  local step
  while IFS=$'\t' read -r step result seconds; do
    case $result-$step in passed-quick | passed-slow | passed-profile) ;; passed-*) continue ;; esac
    [ -e "$state/$step.log" ] || continue # of another machine
    printf '\n## %s: %s\n```\n' "$step" "$result"
    [ "$step" != profile ] || sed -nE "/==PROF==/d; s/.*($kernels).*/\1/p; s/^ +((gpu|dram|lts|sm|launch)__.*)/  \1/p" \
      "$state/$step.log" | tr -s ' ' | head -n 60
    { grep -E '(^|\] )(FAILED|ERROR) |^(FAIL |E  |========= (Invalid|ERROR|Program))|threw' "$state/$step.log" || true; } |
      sed -E 's/^.*\] (FAILED|ERROR) /\1 /' | sort | uniq -c | sort -rn | head -n 8 | cut -c 1-160
    tail -n 2 "$state/$step.log" | cut -c 1-160
    printf '```\n'
  done <"$state/steps"
  if [ -e "$state/figures.json" ]; then
    printf '\n## Figures\n```\n'
    "$python" benchmarks/gpu.py --show "$state/figures.json" | head -n 60
    printf '```\n'
  fi
}

if [ ! -e "$state/steps" ]; then # what another machine has done
  for before in "$out" "$pack"; do
    [ -e "$before/steps" ] || continue
    cp "$before/steps" "$state/"
    [ ! -e "$before/figures.json" ] || cp "$before/figures.json" "$state/"
    [ ! -e "$before/logs.txt" ] || cp "$before/logs.txt" "$state/before.log"
    break
  done
fi
touch "$state/steps"
finished() { # a step; what it has installed is not on every machine
  cut -f 1 "$state/steps" | grep -qx "$1" && { [ "$1" != install ] || [ -d "$site" ]; }
}
left= ran=0
for step in $steps; do
  if finished "$step"; then continue; fi
  if [ -n "$left" ]; then left+=" $step"; continue; fi
  echo "== $step ($((SECONDS - began)) s)"
  run "$step" || left+=" $step"
done
summary "$left" >"$out/summary.md"
# Few files: the logs in one, with their ends, the figures, and what is done.
for log in "$state"/*.log; do printf '\n==== %s\n' "$(basename "$log")"; tail -c 1000000 "$log"; done >"$out/logs.txt"
[ ! -e "$state/figures.json" ] || cp "$state/figures.json" "$out/"
cp "$state/steps" "$out/"
cat "$out/summary.md"
