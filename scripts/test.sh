#!/usr/bin/env bash
# The test command, also of continuous integration: `bash scripts/test.sh [arguments for pytest]`.
#
# Runs ruff, the import contracts, mypy and pytest, in this order, and stops at the first failure. Without arguments the
# whole suite runs in three processes, and at least 90% of the lines must be covered. With arguments
# (`tests/data -k resume`) one process runs the named tests, and coverage is only reported. CHAOS_KILLS=10 also kills
# real runs ten times.
#
# Tests run on the checkout, with the active virtual environment's or PATH's python3 (PYTHON=/path/to/python overrides)
# if it has all dependencies in pyproject.toml, else with .venv-test, which is created here, kept, and updated whenever
# pyproject.toml or constraints.txt changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
minimum_percent=90
# A process takes one share after the other, the longest first. A third process runs all tests that are in no share.
# Three processes for two cores: a fifth of the time goes into waiting for ranks. Not pytest-xdist: its workers have
# threads, and the tests fork ranks.
# The first shares run without coverage, which costs a third more time; other tests cover the same lines.
plain=(
  "tests/docs tests/scripts tests/test_packaging.py" # docs first: plans in forks need a parent without autograd threads
  "tests/simulated_npu/test_training.py"
  "tests/cluster"
  "tests/memory"
  "tests/parallel/test_equality.py tests/parallel/test_toys.py"
  "tests/parallel/test_context.py"
  "tests/parallel/test_expert_parallelism.py tests/parallel/test_expert_shards.py"
  "tests/parallel/test_layout_mode.py tests/scripts/test_parity_layouts.py"
  "tests/parallel tests/optim tests/loss"
  "tests/simulated_npu/test_command_line.py tests/simulated_npu/test_patches.py"
  "tests/plan/test_tracer.py tests/plan/test_real_allocations.py"
  "tests/parallel/test_state.py tests/parallel/test_checkpointed_collectives.py"
  "tests/train/test_compilation.py tests/parallel/test_float8.py tests/optim/test_low_bit_adamw.py" # the compiler's threads forbid forks in other shares
  "tests/models"
  "tests/simulated_npu/test_device.py tests/simulated_npu/test_collectives.py"
)
measured=(
  "tests/cli/test_plan.py tests/train/test_resume.py tests/train/test_skipped_steps.py"
  "tests/data tests/metrics tests/profiler tests/patches"
  "tests/checkpoint"
  "tests/plan"
  "tests/toys"
  "tests/sweep"
  "tests/report"
)
shares=("${plain[@]}" "${measured[@]}")

say() { printf 'test.sh: %s\n' "$1"; }
fail() {
  say "$1"
  exit 1
}

# Prints the dependencies, and the extras of the tests, that the given Python lacks.
lacks() {
  "$1" - 2>&1 <<'PYTHON'
import re
import sys
from importlib import metadata

if sys.version_info < (3, 10):
    sys.exit("Python 3.10 (it is %d.%d.%d)" % sys.version_info[:3])

def numbers(version):
    return [int(part) for part in re.findall(r"\d+", version)[:3]]

with open("pyproject.toml", encoding="utf-8") as file:
    arrays = re.findall(r"^(?:dependencies|data|docs|generate|oracle|report|slurm|tensorboard|torchao|wandb|test) = \[(.*?)\]$", file.read(), re.S | re.M)
for name, floor in re.findall(r'"([\w.-]+)(?:>=([\d.]+))?"', "".join(arrays)):
    try:
        if numbers(metadata.version(name)) < numbers(floor):
            print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name)
PYTHON
}

python=${PYTHON:-}
if [[ -z $python ]]; then
  python=python3
  [[ ! -x ${VIRTUAL_ENV:-}/bin/python ]] || python=$VIRTUAL_ENV/bin/python
fi
missing=$(lacks "$python") || fail "$python cannot run the tests: it needs ${missing:-Python 3.10 or newer}; set PYTHON=/path/to/python"
if [[ -n $missing ]]; then
  venv=$root/.venv-test
  marker=$venv/.installed-$(cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
  if [[ ! -e $marker ]]; then
    say "$python lacks ${missing//$'\n'/, }; installing into $venv"
    "$python" -m venv --clear "$venv" || fail "could not make $venv (Debian, Ubuntu: apt install python3-venv)"
    "$venv/bin/python" -m pip install --quiet -c constraints.txt -e '.[test]' || fail "pip could not install the tests' dependencies"
    touch "$marker"
  fi
  python=$venv/bin/python
fi

scratch=$(mktemp -d)
lanes=() # process groups
# shellcheck disable=SC2329  # called by a trap
kill_lanes() { # signal
  local group
  for group in "${lanes[@]}"; do
    kill "$1" -- "-$group" 2>/dev/null || true
  done
}
trap 'kill_lanes -TERM; rm -rf "$scratch"' EXIT
export COVERAGE_FILE=$scratch/coverage
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Processes started by tests in other folders import this checkout, and no other copy of fsdptoys.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

times='' pytest_seconds=0
part() { # name, command: run it, record its time, stop everything if it fails
  local name=$1 start=$SECONDS status=0 took
  shift
  say "$name"
  "$@" || status=$?
  took=$((SECONDS - start))
  [[ $name != pytest ]] || pytest_seconds=$took
  times+="$name $took s; "
  [[ $status == 0 ]] || finish "$status" "FAILED: $name"
}

finish() { # exit status, message; pytest's closing line comes last, since it counts the tests of all processes
  printf '\n'
  say "$2; ${times%; }"
  [[ ! -e $scratch/pytest.log ]] || closing_line "$pytest_seconds" "$scratch"/pytest*.log
  exit "$1"
}

closing_line() { # seconds of pytest in all, its logs
  "$python" - "$@" <<'PYTHON'
import collections
import os
import re
import sys

total, seconds, *paths = collections.Counter(), *sys.argv[1:]
for path in paths:
    with open(path, encoding="utf-8", errors="replace") as log:
        text = re.sub(r"\x1b\[[0-9;]*m", "", log.read())
    found = re.findall(r"^=* ?((?:\d+ [a-z]+(?:, )?)+|no tests ran) in ([0-9.]+)s", text, re.M)
    counts, own = found[-1] if found else ("ended without a closing line", "")
    if len(paths) > 1:
        print(f"test.sh: {os.path.basename(path).removesuffix('.log')}: {counts}" + f" in {own}s" * bool(own))
    for number, outcome in re.findall(r"(\d+) ([a-z]+)", counts):
        total[outcome if number != "1" else outcome.removesuffix("s")] += int(number)
if total:
    print(", ".join(f"{number} {outcome}" for outcome, number in total.items()), f"in {seconds}s")
PYTHON
}

color=no
[[ ! -t 1 ]] || color=yes

# shellcheck disable=SC2329  # called through `part`, like the next two
run_pytest() {
  "$python" -m coverage run -m pytest --color="$color" "$@" | tee "$scratch/pytest.log"
}

# shellcheck disable=SC2329
log_of() { # number of a share
  local first=${shares[$1]%% *}
  printf '%s/pytest-%s.log' "$scratch" "${first##*/}"
}

# shellcheck disable=SC2329
take_shares() { # one process after the other, until no share is left; each has its own log and coverage file
  local number folders others runner status=0
  for number in "${!shares[@]}"; do
    mkdir "$scratch/taken-$number" 2>/dev/null || continue
    read -ra folders <<<"${shares[number]}"
    read -ra others <<<"${shares[*]:0:number} ${shares[*]:number+1}" # possibly files of these folders
    runner=(-m coverage run -m pytest)
    ((number >= ${#plain[@]})) || runner=(-m pytest)
    COVERAGE_FILE=$scratch/coverage-$number "$python" "${runner[@]}" --color="$color" \
      "${folders[@]}" "${others[@]/#/--ignore=}" >"$(log_of "$number")" 2>&1 </dev/null || status=$?
  done
  return "$status"
}

# shellcheck disable=SC2329
run_shares() { # tests in no share print as they run, shares when all are done
  local status=0 lane ignored
  read -ra ignored <<<"${shares[*]}"
  set -m # without job control, bash makes background processes ignore Ctrl-C, which tests send to theirs
  for lane in 1 2; do
    take_shares &
    lanes+=("$!")
  done
  set +m
  trap 'kill_lanes -INT' INT
  run_pytest tests "${ignored[@]/#/--ignore=}" || status=$?
  ((status)) || take_shares || status=$?
  for lane in "${lanes[@]}"; do
    local lane_status=0
    wait "$lane" || lane_status=$?
    # Ctrl-C ends a wait, and all processes later.
    ! kill -0 "$lane" 2>/dev/null || wait "$lane" || lane_status=$?
    status=$((status ? status : lane_status))
  done
  trap - INT
  lanes=()
  for lane in "${!shares[@]}"; do
    [[ ! -e $(log_of "$lane") ]] || { say "pytest ${shares[lane]}" && cat "$(log_of "$lane")"; }
  done
  return "$status"
}

# shellcheck disable=SC2329
report_coverage() {
  sleep 2 # multiprocessing's helpers end a moment after pytest and delete their empty files
  "$python" -m coverage combine --quiet "$scratch"/coverage* && "$python" -m coverage report --skip-covered "$@"
}

part 'ruff check' "$python" -m ruff check .
part 'ruff format' "$python" -m ruff format --check .
part 'import layers' "$python" -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'
part 'mypy' "$python" -m mypy
if [[ $# == 0 ]]; then
  part 'pytest' run_shares
  part "coverage, at least $minimum_percent%" report_coverage --fail-under="$minimum_percent"
else
  part 'pytest' run_pytest "$@"
  part 'coverage' report_coverage
fi
if [[ -n ${CHAOS_KILLS:-} ]]; then
  part "chaos, $CHAOS_KILLS kills" "$python" scripts/chaos.py --kills "$CHAOS_KILLS"
fi
finish 0 'passed'
