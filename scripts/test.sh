#!/usr/bin/env bash
# The test command: `bash scripts/test.sh [--all | --coverage] [--times FILE] [arguments for pytest]`.
#
# Runs ruff, the check of names, the import contracts, mypy and pytest, in this order, and stops at the first failure.
# Without --all, pytest runs the short level: every promise once, at its smallest size. With --all it runs everything, as
# continuous integration does. --coverage runs the short level, which must cover at least 90% of the lines, in about
# twice its time.
# With arguments (`tests/data -k resume`) pytest runs the named tests only. --times FILE writes CPU seconds and wall
# seconds of every test. CHAOS_KILLS=10 also kills real runs ten times.
#
# Tests run on the checkout, with the active virtual environment's or PATH's python3 (PYTHON=/path/to/python overrides)
# if it has all dependencies in pyproject.toml, else with .venv-test, which is created here, kept, and updated whenever
# pyproject.toml or constraints.txt changes.
set -euo pipefail
invoked_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
minimum_percent=90 # of the lines, by the short level

coverage='' named='' words=()
while (($#)); do
  case $1 in
    --coverage) coverage=yes ;;
    --times)
      [[ $# -gt 1 ]] || { printf 'test.sh: --times needs a file\n' && exit 2; }
      shift
      case $1 in /*) words+=(--times "$1") ;; *) words+=(--times "$invoked_from/$1") ;; esac
      ;;
    *) named=yes words+=("$1") ;;
  esac
  shift
done

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
    arrays = re.findall(r"^(?:dependencies|data|docs|generate|mlflow|oracle|report|slurm|tensorboard|torchao|wandb|test) = \[(.*?)\]$", file.read(), re.S | re.M)
for name, floor in re.findall(r'"([\w.-]+)(?:>=([\d.]+))?"', "".join(arrays)):
    try:
        if numbers(metadata.version(name)) < numbers(floor):
            print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name)
PYTHON
}

# Shows pip's progress: a line for every tenth package, and what it says at the end.
show_packages() {
  local line count=0
  while IFS= read -r line; do
    case $line in
      'Collecting '*)
        count=$((count + 1))
        ((count % 10)) || say "$count packages found"
        ;;
      'Installing collected '*) say "installing $count packages" ;;
      'Successfully installed '*) say 'installed' ;;
    esac
  done
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
    "$venv/bin/python" -m pip install --progress-bar off -c constraints.txt -e '.[test]' | show_packages ||
      fail "pip could not install the tests' dependencies"
    touch "$marker"
  fi
  python=$venv/bin/python
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export COVERAGE_FILE=$scratch/coverage
export OMP_NUM_THREADS=1
# Processes started by tests in other folders import this checkout, and no other copy of fsdptoys.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

times=''
part() { # name, command: run it, record its time, stop everything if it fails
  local name=$1 start=$SECONDS status=0
  shift
  say "$name"
  "$@" || status=$?
  times+="$name $((SECONDS - start)) s; "
  [[ $status == 0 ]] || finish "$status" "FAILED: $name"
}

finish() { # exit status, message; pytest's closing line comes last
  printf '\n'
  say "$2; ${times%; }"
  [[ ! -e $scratch/pytest.log ]] || grep -E '[0-9]+ [a-z]+.* in [0-9.]+s' "$scratch/pytest.log" | tail -n 1
  exit "$1"
}

color=no
[[ ! -t 1 ]] || color=yes

# shellcheck disable=SC2329  # called through `part`, like the next
run_pytest() {
  local runner=(-m pytest)
  [[ -z $coverage ]] || runner=(-m coverage run -m pytest)
  "$python" "${runner[@]}" --color="$color" "$@" | tee "$scratch/pytest.log"
}

# shellcheck disable=SC2329
report_coverage() {
  "$python" -m coverage combine --quiet "$scratch"/coverage* && "$python" -m coverage report --skip-covered "$@"
}

part 'ruff check' "$python" -m ruff check .
part 'ruff format' "$python" -m ruff format --check .
part 'names' "$python" scripts/check_names.py
part 'import layers' "$python" -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'
part 'mypy' "$python" -m mypy
part 'pytest' run_pytest ${words[@]+"${words[@]}"}
if [[ -n $coverage && -n $named ]]; then
  part coverage report_coverage
elif [[ -n $coverage ]]; then
  part "coverage, at least $minimum_percent%" report_coverage --fail-under="$minimum_percent"
fi
if [[ -n ${CHAOS_KILLS:-} ]]; then
  part "chaos, $CHAOS_KILLS kills" "$python" scripts/chaos.py --kills "$CHAOS_KILLS"
fi
finish 0 'passed'
