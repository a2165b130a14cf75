#!/usr/bin/env bash
# The one test command, which continuous integration runs too: `bash scripts/test.sh [arguments for pytest]`.
#
# In order, stopping at the first failure: ruff, import floors, mypy, pytest under coverage. With no arguments the whole
# suite runs, as three processes side by side, and at least 90% of the lines must be covered; with arguments
# (`tests/data -k resume`) one process runs what they name, and coverage is only told. CHAOS_KILLS=10 kills real runs too.
#
# The tests run on the checkout with the active virtual environment's or PATH's python3 (PYTHON=/path/to/python
# overrides) where that has all that pyproject.toml asks for, else with .venv-test, which is made here, kept, and
# installed again whenever pyproject.toml or constraints.txt changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
minimum_percent=90
# What the second and the third process run; the first runs all the rest of tests/. They should take about as long as each
# other, as their closing lines tell. Three, for two cores: tests wait for each other's ranks a fifth of the time. Not
# pytest-xdist: its workers have threads, and the tests fork ranks.
shares=("tests/checkpoint tests/parallel" "tests/data tests/memory tests/metrics tests/models tests/plan tests/recorded tests/report tests/simulator tests/sweep tests/sweeping")

say() { printf 'test.sh: %s\n' "$1"; }
fail() {
  say "$1"
  exit 1
}

# Prints what the Python given lacks of the dependencies and of the extras of the tests; nothing where all is there.
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
    arrays = re.findall(r"^(?:dependencies|oracle|report|slurm|tensorboard|wandb|test) = \[(.*?)\]$", file.read(), re.S | re.M)
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
others=() # process groups
kill_others() { # signal
  local group
  for group in "${others[@]}"; do
    kill "$1" -- "-$group" 2>/dev/null || true
  done
}
trap 'kill_others -TERM; rm -rf "$scratch"' EXIT
export COVERAGE_FILE=$scratch/coverage
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Processes that the tests start elsewhere find this checkout too, and no other copy of fsdptoys.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

times=''
part() { # name, command: run it, remember how long it took, stop the whole where it fails
  local name=$1 start=$SECONDS status=0
  shift
  say "$name"
  "$@" || status=$?
  times+="$name $((SECONDS - start)) s; "
  [[ $status == 0 ]] || finish "$status" "FAILED: $name"
}

finish() { # exit status, what to say: pytest's closing line comes last, for it counts the tests of all processes
  printf '\n'
  say "$2; ${times%; }"
  [[ ! -e $scratch/pytest.log ]] || closing_line "$scratch"/pytest*.log
  exit "$1"
}

closing_line() { # logs of pytest
  "$python" - "$@" <<'PYTHON'
import collections
import os
import re
import sys

total, longest = collections.Counter(), 0.0
paths = [path for path in sys.argv[1:] if os.path.exists(path)]
for path in paths:
    with open(path, encoding="utf-8", errors="replace") as log:
        text = re.sub(r"\x1b\[[0-9;]*m", "", log.read())
    found = re.findall(r"^=* ?((?:\d+ [a-z]+(?:, )?)+|no tests ran) in ([0-9.]+)s", text, re.M)
    counts, seconds = found[-1] if found else ("ended without a closing line", "0")
    if len(paths) > 1:
        print(f"test.sh: {path.rsplit('/', 1)[-1].removesuffix('.log')}: {counts}" + f" in {seconds}s" * bool(found))
    longest = max(longest, float(seconds))
    for number, outcome in re.findall(r"(\d+) ([a-z]+)", counts):
        total[outcome] += int(number)
if total:
    print(", ".join(f"{number} {outcome}" for outcome, number in total.items()), f"in {longest:.2f}s")
PYTHON
}

color=no
[[ ! -t 1 ]] || color=yes

# shellcheck disable=SC2329  # called through `part`, like the next two
run_pytest() {
  "$python" -m coverage run -m pytest --color="$color" "$@" | tee "$scratch/pytest.log"
}

# shellcheck disable=SC2329
run_shares() { # the first is shown as it goes, the others when all are done; each has coverage data of its own
  local status=0 number folders ignored=()
  set -m # without job control bash has what runs in the background ignore Ctrl-C, which tests send their own processes
  for number in "${!shares[@]}"; do
    read -ra folders <<<"${shares[number]}"
    ignored+=("${folders[@]/#/--ignore=}")
    COVERAGE_FILE=$scratch/coverage-$number "$python" -m coverage run -m pytest --color="$color" \
      "${folders[@]}" >"$scratch/pytest-$number.log" 2>&1 </dev/null &
    others+=("$!")
  done
  set +m
  trap 'kill_others -INT' INT
  run_pytest tests "${ignored[@]}" || status=$?
  for number in "${!shares[@]}"; do
    local group=${others[number]} other_status=0
    wait "$group" || other_status=$?
    # Ctrl-C ends a wait, and all processes later.
    ! kill -0 "$group" 2>/dev/null || wait "$group" || other_status=$?
    status=$((status ? status : other_status))
    say "pytest ${shares[number]}"
    cat "$scratch/pytest-$number.log"
  done
  trap - INT
  others=()
  return "$status"
}

# shellcheck disable=SC2329
report_coverage() {
  sleep 2 # helpers of multiprocessing end a moment after pytest, and take empty files of theirs with them
  "$python" -m coverage combine --quiet "$scratch"/coverage* && "$python" -m coverage report --skip-covered "$@"
}

part 'ruff check' "$python" -m ruff check .
part 'ruff format' "$python" -m ruff format --check .
part 'import floors' "$python" -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'
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
