#!/usr/bin/env bash
# All measurements on a GPU machine that is reached by commands of a few minutes, and may be a fresh one each time.
#
#   bash scripts/gpu_day.sh wheels .wheels            # at home, once: packages that the machine lacks, for a machine
#                                                     # without network; further names may follow, PYTHON_VERSION=3.12
#   bash scripts/gpu_day.sh run --out day --wheels .wheels    # on the machine, again until the status is not 75
#   bash scripts/gpu_day.sh run --device cpu --tiny --out /tmp/day    # a dry run without a GPU
#
# A call works for --seconds (570) at most and skips what is finished with the same code. Its results are in the folder --out and in one file
# beside it, day.tar.gz; a machine that has only the file unpacks it. Pages (*.md) belong into benchmarks/. Parts, in this
# order, of which --only "NAME NAME" selects some:
#
#   gpu     bench_gpu.py, row by row: speed first
#   smoke   gpu_smoke.py, six checks at a time: a call by itself
#   loss    bench_loss.py
#   moe     bench_moe.py (needs transformers)
#   memory  bench_memory.py, row by row
#   plan    bench_plan.py on the measured rows of memory; needs no GPU, and may run at home
#
# Exits with 75 while parts are left, then with 1 if a part failed or missed a target, else with 0.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}

say() { printf 'gpu_day.sh: %s\n' "$1" >&2; }
fail() {
  say "$1"
  exit 2
}

# Of the packages that this project needs beside torch, those that images for CUDA often lack.
get_wheels() { # folder, further names
  local folder=$1 version=${PYTHON_VERSION:-3.12} platforms=() minor
  shift
  mkdir -p "$folder"
  # Has no wheel, and is pure Python. Without constraints, pip takes an omegaconf that hydra-core does not.
  "$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" -c "$root/constraints.txt" antlr4-python3-runtime
  for minor in 5 17 24 27 28; do # pip matches the number exactly
    platforms+=(--platform "manylinux_2_${minor}_x86_64")
  done
  "$python" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version "$version" \
    "${platforms[@]}" --platform manylinux2014_x86_64 -c "$root/constraints.txt" --dest "$folder" \
    hydra-core omegaconf rich markdown-it-py mdurl pygments torchao "$@"
  say "wheels for Python $version in $folder: $(du -sh "$folder" | cut -f 1)"
}

out='' wheels='' device=cuda seconds=570 tiny='' only='gpu smoke loss moe memory plan'
command=${1:-}
[[ $# -eq 0 ]] || shift
case $command in
wheels)
  [[ $# -gt 0 ]] || fail "name a folder for the wheels: bash scripts/gpu_day.sh wheels FOLDER"
  get_wheels "$@"
  exit 0
  ;;
run) ;;
*) fail "write bash scripts/gpu_day.sh wheels FOLDER, or bash scripts/gpu_day.sh run --out FOLDER" ;;
esac
while [[ $# -gt 0 ]]; do
  case $1 in
  --tiny)
    tiny=yes
    shift
    continue
    ;;
  --out | --wheels | --device | --seconds | --only) [[ $# -gt 1 ]] || fail "$1 needs a value" ;;
  *) fail "$1 is unknown; see the first lines of scripts/gpu_day.sh" ;;
  esac
  printf -v "${1#--}" %s "$2"
  shift 2
done
[[ -n $out ]] || fail "name a folder for the results: --out FOLDER"
[[ -n $tiny || $seconds -ge 330 ]] || fail "--seconds $seconds is too short for the longest part; write 330 or more"

if [[ ! -d $out && -f $out.tar.gz ]]; then
  mkdir -p "$out"
  tar -xzf "$out.tar.gz" -C "$out"
fi
# The machine may have no git, and files that no commit has.
version=$(cd "$root" && find fsdptoys scripts configs models patches -type f \( -name '*.py' -o -name '*.yaml' \) -print0 |
  LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c 1-12)
state=$out/state/$version
mkdir -p "$state"
out=$(cd "$out" && pwd)
state=$out/state/$version
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [[ -n $wheels ]]; then
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$scratch/site" "$wheels"/*.whl
  export PYTHONPATH=$scratch/site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# Without compiled modules beside PyTorch's sources, each process spends seconds on compiling them.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$scratch/compiled
cd "$root"

left() { echo $((seconds - SECONDS)); }

# State of a part: missing, "again N" after N calls, or "done STATUS".
state_of() { cat "$state/$1" 2>/dev/null || true; }

# Sets `argv` to the command of a part, and `least` to the seconds without which it is not begun.
command_of() {
  least=120
  case $1 in
  smoke)
    argv=(scripts/gpu_smoke.py --device "$device" --seconds "$(($(left) - 10))" --out "$out" --resume)
    argv+=(--version "$version" --jobs "$([[ $device == cpu ]] && echo 1 || echo 6)")
    least=$((seconds * 9 / 10))
    [[ -z $tiny ]] || argv+=(--checks device "process group")
    ;;
  loss)
    argv=(scripts/benchmarks/bench_loss.py --device "$device" --write "$out/loss.md")
    [[ -z $tiny ]] || argv+=(--shapes 64x32x1000 --repeats 1 --dtypes float32)
    ;;
  gpu)
    argv=(scripts/benchmarks/bench_gpu.py --device "$device" --write "$out/gpu" --resume --seconds "$(($(left) - 15))")
    [[ -z $tiny ]] || argv+=(--tiny --contestants "FSDPToys, eager")
    ;;
  moe)
    argv=(scripts/benchmarks/bench_moe.py --device "$device" --write "$out/moe.md")
    [[ -z $tiny ]] || argv+=(--dim 64 --ffn-dim 32 --tokens 64 --experts 4 --top-k 2 --repeats 1)
    ;;
  memory)
    argv=(scripts/benchmarks/bench_memory.py --device "$device" --write "$out/memory.md" --resume --row-seconds 150)
    argv+=(--seconds "$(($(left) - 15))" --strategies fsdp2 fsdp1)
    [[ -z $tiny ]] || argv+=(--model llama_debug --seq-len 32 --steps 3 --warmup-steps 1 --rows gc "gc chunk")
    ;;
  plan)
    argv=(scripts/benchmarks/bench_plan.py --device "$device" --measured "$out/memory.json" --write "$out/plan.md")
    argv+=(--strategies fsdp2 --rows plain gc "gc chunk" "gc chunk oo")
    least=300 # a trace of 32 layers takes half a minute
    [[ -z $tiny ]] || argv+=(--hardware cpu --rows gc)
    ;;
  *) fail "--only $1: must be of smoke, loss, gpu, moe, memory, plan" ;;
  esac
  [[ -z $tiny ]] || least=5
}

run_part() { # name; returns 0 if it is finished, 1 if it is left for another call
  local part=$1 known status=0 calls=0
  known=$(state_of "$part")
  [[ $known != done* ]] || return 0
  [[ $known != again* ]] || calls=${known#again }
  command_of "$part"
  (($(left) >= least)) || return 1
  say "$part, $(left) s left: python ${argv[*]}"
  timeout --kill-after=5 "$(left)" "$python" "${argv[@]}" >"$out/$part.log" 2>"$scratch/errors" || status=$?
  tail -n 3 "$scratch/errors" >&2
  tail -n 40 "$scratch/errors" >>"$out/$part.log"
  calls=$((calls + 1))
  # A part that continues check by check or row by row ends with 75. One that ran out of time altogether gets a second call.
  if [[ $status == 75 ]] || [[ ($status == 124 || $status == 137) && $calls -lt 2 ]]; then
    echo "again $calls" >"$state/$part"
    return 1
  fi
  echo "done $status" >"$state/$part"
}

missing='' failed=''
for part in $only; do
  run_part "$part" || missing+=" $part"
  [[ $(state_of "$part") != "done "[!0]* ]] || failed+=" $part"
done
tar -czf "$out.tar.gz" -C "$out" .
for part in $only; do
  say "$part: $(state_of "$part")"
done
if [[ -n $missing ]]; then
  say "left:$missing; run the same command again"
  exit 75
fi
[[ -z $failed ]] || say "failed or missed a target:$failed; see their .log and .md in $out"
[[ -z $failed ]]
