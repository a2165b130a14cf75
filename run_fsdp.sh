#!/usr/bin/env bash
# Starts training: `bash run_fsdp.sh model=llama3_1b mesh.fsdp_size=4`. Needs bash and Python 3.10 or newer, nothing else.
# A command before the arguments runs that instead: `bash run_fsdp.sh plan model=llama3_1b`, sweep, report, compare, ...
#
# All that happens here is finding a Python that can run the project, in this order:
#   1. the active virtual environment's or PATH's python3 (PYTHON=/path/to/python overrides), if it has what we need;
#   2. .venv beside this script; where there is none, or an installation was interrupted, it is installed now. If the
#      Python of step 1 has a torch that works, .venv uses that torch and installs only missing packages.
# Looking for hardware, setting its environment variables, choosing the number of ranks and saying so is done by
# `fsdptoys train` (fsdptoys/launch/launch.py), so that this script, `python -m fsdptoys train` and torchrun do the same. The
# variables and their reasons stand in fsdptoys/device/kinds.py, those for Ascend NPUs also in docs/ascend.md.
# torch_npu is not among the dependencies: for NPUs install the extra "npu" first, in the environment of step 1.
#
# It kills nothing and, besides .venv and the fsdptoys.egg-info that an editable installation leaves here, writes nothing.
# Where several machines share this folder, let the first run on one of them finish installing before starting the rest.
set -euo pipefail

say() { printf 'run_fsdp.sh: %s\n' "$1" >&2; }
fail() {
  say "$2"
  exit "$1"
}

# The folder of this script, behind any symbolic links; with an empty CDPATH, or `cd` might go elsewhere.
script=${BASH_SOURCE[0]}
while [[ -L $script ]]; do
  target=$(readlink "$script")
  [[ $target == /* || $script != */* ]] || target=${script%/*}/$target
  script=$target
done
[[ $script == */* ]] || script=./$script
root=$(CDPATH='' cd -P -- "${script%/*}/" && pwd)
venv=$root/.venv
marker=$venv/.fsdptoys-install # says "started", then "done"

# One line about the Python given: "old VERSION", "missing NAMES", "ready", or "checkout" where everything is there but
# this copy of fsdptoys. Nothing is imported but the standard library, and the current folder is not looked at.
# A Python of any age can run it, hence the spelling.
probe() {
  "$1" - "$root" 2>/dev/null <<'PYTHON'
import sys
sys.path[:] = [entry for entry in sys.path if entry]
if sys.version_info < (3, 10):
    print("old %d.%d.%d" % sys.version_info[:3])
    sys.exit()
import importlib.util, os, re
from importlib import metadata

def numbers(version):
    return [int(part) for part in re.findall(r"\d+", version)[:3]]

def is_there(name, floor):
    try:
        return numbers(metadata.version(name)) >= numbers(floor)
    except Exception:  # absent, or half installed
        return False

root = sys.argv[1]
with open(os.path.join(root, "pyproject.toml"), encoding="utf-8") as file:
    dependencies = re.search(r"^dependencies = \[(.*?)\]$", file.read(), re.S | re.M).group(1)
missing = [n for n, f in re.findall(r'"([\w.-]+)(?:>=([\d.]+))?"', dependencies) if not is_there(n, f)]
spec = importlib.util.find_spec("fsdptoys")
if missing:
    print("missing " + ", ".join(missing))
elif spec and spec.origin and os.path.realpath(spec.origin).startswith(os.path.realpath(root) + os.sep):
    print("ready")
else:
    print("checkout")
PYTHON
}

# Version of the given Python's torch, if it is new enough and can be imported; nothing otherwise.
working_torch() {
  "$1" - "$root" torch 2>/dev/null <<'PYTHON'
import os, re, sys
from importlib import metadata

def numbers(version):
    return [int(part) for part in re.findall(r"\d+", version)[:3]]

with open(os.path.join(sys.argv[1], "pyproject.toml"), encoding="utf-8") as file:
    floor = re.search(r'"torch>=([\d.]+)"', file.read()).group(1)
sys.path[:] = [entry for entry in sys.path if entry]
if numbers(metadata.version("torch")) >= numbers(floor):
    import torch
    print(metadata.version("torch"))
PYTHON
}

# Constraints for an environment that sees other packages: its torch, and the pins of packages that it lacks.
constraints_around() {
  "$1" - "$root" constraints <<'PYTHON'
import os, re, sys
from importlib import metadata

def is_there(name):
    try:
        return bool(metadata.version(name))
    except Exception:
        return False

print("torch==" + metadata.version("torch"))
with open(os.path.join(sys.argv[1], "constraints.txt"), encoding="utf-8") as file:
    print("".join(line for line in file if not is_there(re.match(r"[\w.-]*", line).group() or "-")), end="")
PYTHON
}

# `venv` looks beside the first Python only: if the given one is itself an environment's, the new one needs its folder.
see_packages_of() { # python, environment
  "$1" - "$2" environment <<'PYTHON'
import os, sys, sysconfig
if sys.prefix != sys.base_prefix:
    folder = sysconfig.get_path("purelib", vars={"base": sys.argv[1], "platbase": sys.argv[1]})
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "packages_beside.pth"), "w", encoding="utf-8") as file:
        file.write(sysconfig.get_path("purelib") + "\n")
PYTHON
}

run() { # python, its probe's answer, arguments: a command or, without one, those of `fsdptoys train`
  local python=$1 state=$2
  shift 2
  if [[ $state == checkout ]]; then
    say "$python has the dependencies; fsdptoys itself is taken from $root"
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
  fi
  [[ $# -gt 0 && $1 != *=* && $1 != -* ]] || set -- train "$@"
  exec "$python" -m fsdptoys "$@"
}

# 1. The Python that the user means, or else any on PATH that is new enough.
if [[ -n ${PYTHON:-} ]]; then
  candidates=("$PYTHON")
elif [[ -n ${VIRTUAL_ENV:-} && -x $VIRTUAL_ENV/bin/python ]]; then
  candidates=("$VIRTUAL_ENV/bin/python" python3.13 python3.12 python3.11 python3.10)
else
  candidates=(python3 python python3.13 python3.12 python3.11 python3.10)
fi
base='' old=''
for candidate in "${candidates[@]}"; do
  python=$(command -v "$candidate") || continue
  state=$(probe "$python") || continue # a stub that runs nothing, as version managers leave on PATH
  case $state in
    ready | checkout) run "$python" "$state" "$@" ;;
    missing\ *) base=$python ;;
    old\ *) old=${old:-"$python (${state#old })"} ;;
  esac
  [[ -z $base ]] || break
done
if [[ -z $base ]]; then
  fail 2 "needs Python 3.10 or newer, found ${old:-none that runs (looked for: ${candidates[*]})}; install one or set PYTHON=/path/to/python"
fi

# 2. The environment of our own.
state=''
if [[ -e $venv/bin/python || -L $venv/bin/python ]]; then
  state=$(probe "$venv/bin/python") || state=broken
  [[ $state != broken && $state != old\ * ]] ||
    fail 2 "$venv holds a Python that is too old or does not run; remove that folder and start again"
fi
interrupted=$([[ -e $marker && $(<"$marker") != 'done' ]] && echo yes || true)
case $state in
  ready | checkout) [[ -n $interrupted ]] || run "$venv/bin/python" "$state" "$@" ;;
esac
if [[ -n $interrupted ]]; then
  say "the installation in $venv was interrupted; installing again"
else
  say "$base lacks what fsdptoys needs; installing it into $venv, once"
fi
"$base" -c 'import ensurepip, venv' 2>/dev/null ||
  fail 2 "$base cannot make a virtual environment; install its venv module (Debian, Ubuntu: apt install python3-venv) or set PYTHON to a Python that has fsdptoys's dependencies"
torch=$(working_torch "$base") || torch=''
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  "$base" -m venv ${torch:+--system-site-packages} "$venv" >&2 ||
    fail 1 "could not make $venv (see above); set PYTHON to a Python that has fsdptoys's dependencies"
  [[ -z $torch ]] || see_packages_of "$base" "$venv"
fi
echo started >"$marker"
constraints=$root/constraints.txt
if [[ -n $torch && $(working_torch "$venv/bin/python") == "$torch" ]]; then
  say "keeps torch $torch of $base; $venv uses the packages that are there, and gets those that are not"
  constraints=$venv/constraints.txt
  constraints_around "$venv/bin/python" >"$constraints"
fi
"$venv/bin/python" -m pip install -c "$constraints" -e "$root[report]" >&2 ||
  fail 1 "pip could not install fsdptoys into $venv (see above); start again to try again, or set PYTHON to a Python that has its dependencies"
echo 'done' >"$marker"
say "installed into $venv; for the command fsdptoys in your shell: source $(printf '%q' "$venv")/bin/activate"
run "$venv/bin/python" "$(probe "$venv/bin/python")" "$@"
