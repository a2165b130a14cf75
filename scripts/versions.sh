#!/usr/bin/env bash
# Runs selected tests and commands under several versions of PyTorch: `bash scripts/versions.sh 2.7.1 2.11.0 2.15.0`.
#
# Each version has an environment, FOLDER/torch-VERSION, which is created once and kept. A torch of that version that is
# already there is kept too. The project is installed with the extras of the tests and the pins of constraints.txt,
# except that of torch. benchmarks/versions.md is written anew after each version. The exit status is 1 if anything
# failed.
#
#   --quick            all commands, and only the equality of strategies and the patches of the tests: a third of the time
#   --envs FOLDER      the folder of the environments, by default .venv-versions
#   --page FILE        the page, by default benchmarks/versions.md
#   --index-url URL    pip's index for torch, also as TORCH_INDEX_URL: https://download.pytorch.org/whl/cpu has builds for
#                      CPUs (200 MB), while PyPI's are for CUDA (up to 3 GB with the libraries that pip adds)
#
# PYTHON=/path/to/python makes the environments, by default PATH's python3: 3.10 or newer, and one that all versions have
# wheels for. The tests and commands of a version take about twenty minutes on two cores (scripts/versions.py).
set -euo pipefail
command="bash scripts/versions.sh $*"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'versions.sh: %s\n' "$1" >&2; }
fail() {
  say "$1"
  exit 2
}

folder=.venv-versions page=benchmarks/versions.md quick='' index=${TORCH_INDEX_URL:-} versions=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --envs | --page | --index-url)
      [[ $# -gt 1 ]] || fail "$1 needs a value"
      case $1 in --envs) folder=$2 ;; --page) page=$2 ;; *) index=$2 ;; esac
      shift 2
      ;;
    --quick) quick=--quick && shift ;;
    [0-9]*) versions+=("$1") && shift ;;
    *) fail "unknown argument $1; usage: bash scripts/versions.sh [--quick] [--envs FOLDER] [--page FILE] [--index-url URL] VERSION..." ;;
  esac
done
[[ ${#versions[@]} -gt 0 ]] || fail "no version; for example: bash scripts/versions.sh 2.7.1 2.15.0"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Processes started by tests in other folders import this checkout, and no other copy of fsdptoys.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

torch_version() { # of the given Python; nothing without a torch that can be imported
  "$1" -c 'from importlib import metadata; import torch; print(metadata.version("torch"))' 2>/dev/null || true
}

results=() status=0
for version in "${versions[@]}"; do
  environment=$folder/torch-$version
  python=$environment/bin/python
  [[ -x $python ]] || "${PYTHON:-python3}" -m venv "$environment" || fail "could not make $environment"
  found=$(torch_version "$python")
  if [[ ${found%%+*} != "$version" ]]; then
    say "installs torch $version into $environment"
    "$python" -m pip install --quiet ${index:+--index-url "$index"} "torch==$version" || fail "pip could not install torch $version"
    found=$(torch_version "$python")
    [[ ${found%%+*} == "$version" ]] || fail "$python has torch ${found:-that cannot be imported}, not $version"
  fi
  {
    grep -vE '^(torch|torch_npu)==' constraints.txt
    echo "torch==$found"
  } >"$scratch/constraints.txt"
  marker=$environment/.installed-$(cat pyproject.toml "$scratch/constraints.txt" | cksum | cut -d ' ' -f 1)
  if [[ ! -e $marker ]]; then
    say "installs the project and the tests' dependencies into $environment"
    "$python" -m pip install --quiet -c "$scratch/constraints.txt" -e '.[test]' || fail "pip could not install the tests' dependencies into $environment"
    touch "$marker"
  fi
  say "tests torch $found"
  "$python" scripts/versions.py run "$scratch/$version.json" $quick
  results+=("$scratch/$version.json")
  status=0
  "$python" scripts/versions.py page "$page" --command "$command" "${results[@]}" >"$scratch/page" || status=$?
done
cat "$scratch/page"
exit "$status"
