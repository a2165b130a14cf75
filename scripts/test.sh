#!/usr/bin/env bash
# The one test command, which continuous integration runs too: `bash scripts/test.sh [arguments for pytest]`.
#
# In order, stopping at the first failure: ruff, import floors, mypy, pytest under coverage. With no arguments the whole
# suite runs and at least 90% of the lines must be covered; with arguments (`tests/data -k resume`) coverage is only told.
#
# The tests run on the checkout with the active virtual environment's or PATH's python3 (PYTHON=/path/to/python
# overrides) where that has all that pyproject.toml asks for, else with .venv-test, which is made here, kept, and
# installed again whenever pyproject.toml or constraints.txt changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
minimum_percent=90

say() { printf 'test.sh: %s\n' "$1"; }
fail() {
  say "$1"
  exit 1
}

# Prints what the Python given lacks of the dependencies and of the extras "oracle" and "test"; nothing where all is there.
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
    arrays = re.findall(r"^(?:dependencies|oracle|test) = \[(.*?)\]$", file.read(), re.S | re.M)
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
trap 'rm -rf "$scratch"' EXIT
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

finish() { # exit status, what to say: pytest's closing line comes last, for it counts the tests
  printf '\n'
  say "$2; ${times%; }"
  [[ ! -e $scratch/pytest.log ]] ||
    sed 's/\x1b\[[0-9;]*m//g' "$scratch/pytest.log" | grep -E '^=* ?([0-9]+ [a-z]+(, )?)+ in [0-9.]+s|^=* ?no tests ran' | tail -n 1 || true
  exit "$1"
}

# shellcheck disable=SC2329  # called through `part`, like the next
run_pytest() {
  local color=no
  [[ ! -t 1 ]] || color=yes
  "$python" -m coverage run -m pytest --color="$color" "$@" | tee "$scratch/pytest.log"
}

# shellcheck disable=SC2329
report_coverage() {
  "$python" -m coverage combine --quiet && "$python" -m coverage report --skip-covered "$@"
}

part 'ruff check' "$python" -m ruff check .
part 'ruff format' "$python" -m ruff format --check .
part 'import floors' "$python" -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'
part 'mypy' "$python" -m mypy
part 'pytest' run_pytest "$@"
if [[ $# == 0 ]]; then
  part "coverage, at least $minimum_percent%" report_coverage --fail-under="$minimum_percent"
else
  part 'coverage' report_coverage
fi
finish 0 'passed'
