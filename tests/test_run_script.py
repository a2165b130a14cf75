"""run_fsdp.sh: choice of Python, passing of arguments, and error messages."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COPIED = ("run_fsdp.sh", "pyproject.toml", "constraints.txt")

REPORTING_PACKAGE = """
import json, os, sys
report = {"python": sys.executable, "file": __file__, "cwd": os.getcwd(), "arguments": sys.argv[1:]}
print(json.dumps(report))
"""

STUB = """#!/usr/bin/env bash
here=$(dirname "$0")
name=${0##*/}
folder=${!#}
case "$*" in
  "- "*" torch" | "- "*" constraints" | "- "*" environment")
    [ -z "${TORCH:-}" ] || [ ! -e "$here/$name.sees-torch" ] || exec "$TORCH" "$@"
    exit 1
    ;;
  "- "*) cat "$here/$name.state"; exit ;;
  "-c "*) [ -z "${NO_VENV_MODULE:-}" ]; exit ;;
  "-m pip --version") exit ;;
esac
echo "$name $*" >>"$LOG"
case "$1 $2" in
  "-m venv")
    mkdir -p "$folder/bin" && cp "$here/$name" "$folder/bin/python" &&
      echo missing torch >"$folder/bin/python.state"
    [ "$3" != --system-site-packages ] || touch "$folder/bin/python.sees-torch"
    ;;
  "-m pip")
    [ -z "${PIP_FAILS:-}" ] || { echo "no matching distribution"; exit 1; }
    echo ready >"$here/$name.state"
    ;;
esac
"""
"""A Python stub that answers the script's query from NAME.state, copies itself and records its
arguments.

Queries about torch go to the Python TORCH, if the stub has it (NAME.sees-torch) or sees that of
another one.
"""


@dataclass
class Sandbox:
    """A checkout whose fsdptoys only reports how it was started, and a folder first on PATH."""

    checkout: Path
    path: Path
    log: Path

    def add_stubs(self, states: Mapping[str, str]) -> None:
        """Put Pythons with these names (relative to PATH, or in ``checkout``) that answer these
        states."""
        for name, state in states.items():
            stub = self.path / name.replace("checkout", str(self.checkout))
            stub.parent.mkdir(parents=True, exist_ok=True)
            stub.write_text(STUB)
            stub.chmod(0o755)
            stub.with_name(f"{stub.name}.state").write_text(state + "\n")

    def start(
        self,
        *arguments: str,
        script: Path | None = None,
        cwd: Path | None = None,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run the script with bash, without the variables of a virtual environment around the
        tests."""
        environment = {
            k: v
            for k, v in os.environ.items()
            if k not in ("VIRTUAL_ENV", "PYTHONPATH")
        }
        environment |= {
            "PATH": f"{self.path}:{os.environ['PATH']}",
            "LOG": str(self.log),
            **variables,
        }
        return subprocess.run(
            ["bash", str(script or self.checkout / "run_fsdp.sh"), *arguments],
            capture_output=True,
            text=True,
            env=environment,
            cwd=cwd or self.path,
        )

    def calls(self) -> list[str]:
        """Calls of the stubs, except queries without effect."""
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    checkout = tmp_path / "a checkout with spaces"
    (checkout / "fsdptoys").mkdir(parents=True)
    (checkout / "fsdptoys" / "__init__.py").touch()
    (checkout / "fsdptoys" / "__main__.py").write_text(REPORTING_PACKAGE)
    for name in COPIED:
        shutil.copy(ROOT / name, checkout)
    (tmp_path / "path").mkdir()
    return Sandbox(checkout, tmp_path / "path", tmp_path / "log")


def test_bare_checkout_runs_with_the_given_interpreter(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    """Oracle: the argument vector, working directory and interpreter as the started module sees
    them."""
    arguments = [
        "train.batch_size=2",
        "a b",
        "",
        "it's",
        'say "x"',
        "list=[1, 2]",
        "glob=*",
        "$HOME",
        "back\\slash",
    ]
    elsewhere = tmp_path / "runs go here"
    elsewhere.mkdir()
    process = sandbox.start(*arguments, cwd=elsewhere, PYTHON=sys.executable)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == {
        "python": sys.executable,
        "file": str(sandbox.checkout / "fsdptoys" / "__main__.py"),
        "cwd": str(elsewhere),
        "arguments": ["train", *arguments],
    }
    assert f"fsdptoys itself is taken from {sandbox.checkout}" in process.stderr
    assert {path.name for path in sandbox.checkout.iterdir()} == {"fsdptoys", *COPIED}


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("", "train"),
        ("parallel=fsdp1 train.steps=3", "train parallel=fsdp1 train.steps=3"),
        ("--help", "train --help"),
        ("-m parallel=fsdp1,fsdp2", "train -m parallel=fsdp1,fsdp2"),
        ("plan model=llama3_1b", "plan model=llama3_1b"),
        ("sweep debug --dry-run", "sweep debug --dry-run"),
        ("report runs/a --out page.html", "report runs/a --out page.html"),
        ("train train.steps=3", "train train.steps=3"),
    ],
)
def test_first_argument_may_be_a_command(
    arguments: str, command: str, sandbox: Sandbox
) -> None:
    """Oracle: the arguments of the started module; a setting has a = sign and an option a dash."""
    process = sandbox.start(*arguments.split(), PYTHON=sys.executable)
    assert json.loads(process.stdout)["arguments"] == command.split()


@pytest.mark.parametrize(
    "kind", ["absolute", "relative", "chain", "called by its bare name"]
)
def test_symbolic_links_to_the_script_run_the_checkout(
    kind: str, sandbox: Sandbox, tmp_path: Path
) -> None:
    """Oracle: the file of the started module; CDPATH must not lead elsewhere."""
    script = tmp_path / "link.sh"
    cwd = tmp_path
    if kind == "absolute":
        script.symlink_to(sandbox.checkout / "run_fsdp.sh")
    elif kind == "called by its bare name":
        script = Path("run_fsdp.sh")
        cwd = sandbox.checkout
    else:
        relative = Path(sandbox.checkout.name, "run_fsdp.sh")
        script.symlink_to(relative)
        if kind == "chain":
            (tmp_path / "second.sh").symlink_to("link.sh")
            script = Path("second.sh")
    process = sandbox.start(
        script=script, cwd=cwd, PYTHON=sys.executable, CDPATH="/tmp:/"
    )
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["file"] == str(
        sandbox.checkout / "fsdptoys" / "__main__.py"
    )


@pytest.mark.parametrize(
    ("states", "variables", "name"),
    [
        ({"python3": "ready"}, {}, "python3"),
        ({"python3": "ready", "chosen": "ready"}, {"PYTHON": "chosen"}, "chosen"),
        (
            {"python3": "old 3.9.2", "python": "old 2.7.18", "python3.13": "ready"},
            {},
            "python3.13",
        ),
        (
            {"python3": "ready", "venv/bin/python": "ready"},
            {"VIRTUAL_ENV": "venv"},
            "python",
        ),
        (
            {
                "python3": "missing torch",
                "python3.13": "ready",
                "checkout/.venv/bin/python": "ready",
            },
            {},
            "python",
        ),
    ],
    ids=["PATH", "PYTHON", "newer on PATH", "active environment", ".venv"],
)
def test_python_is_chosen_in_the_documented_order(
    states: dict[str, str], variables: dict[str, str], name: str, sandbox: Sandbox
) -> None:
    """Oracle: the name of the only called stub."""
    sandbox.add_stubs(states)
    if "VIRTUAL_ENV" in variables:
        variables = {"VIRTUAL_ENV": str(sandbox.path / "venv")}
    process = sandbox.start("--help", **variables)
    assert (process.returncode, process.stderr) == (0, "")
    assert sandbox.calls() == [f"{name} -m fsdptoys train --help"]


def test_other_copy_of_fsdptoys_on_pythonpath_is_ignored(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    """Oracle: the file of the started module, with a second package of the same name ahead on
    PYTHONPATH."""
    other = tmp_path / "other"
    shutil.copytree(sandbox.checkout / "fsdptoys", other / "fsdptoys")
    process = sandbox.start(PYTHON=sys.executable, PYTHONPATH=str(other))
    assert json.loads(process.stdout)["file"] == str(
        sandbox.checkout / "fsdptoys" / "__main__.py"
    )


def test_own_environment_is_installed_once_and_repaired(sandbox: Sandbox) -> None:
    """Oracle: the list of calls, after a failure of pip, a success, and an interruption."""
    sandbox.add_stubs({"python3": "missing torch"})
    venv = sandbox.checkout / ".venv"
    make = f"python3 -m venv {venv}"
    install = (
        f"python -m pip install -c {sandbox.checkout}/constraints.txt -e "
        f"{sandbox.checkout}[report]"
    )
    train = "python -m fsdptoys train x=1"

    process = sandbox.start("x=1", PIP_FAILS="1")
    assert (process.returncode, process.stdout) == (1, "")
    assert "no matching distribution" in process.stderr
    assert process.stderr.endswith(
        "start again to try again, or set PYTHON to a Python that has its dependencies\n"
    )
    assert sandbox.calls() == [make, install]

    for expected in ([install, train], [train]):
        sandbox.log.unlink()
        process = sandbox.start("x=1")
        assert process.returncode == 0, process.stderr
        assert sandbox.calls() == expected
        hints = [
            shlex.split(line)[-1]
            for line in process.stderr.splitlines()
            if "in your shell: source" in line
        ]
        assert hints == [f"{venv}/bin/activate"] * (install in expected)

    sandbox.log.unlink()
    (venv / ".fsdptoys-install").write_text("started\n")
    assert "was interrupted; installing again" in sandbox.start("x=1").stderr
    assert sandbox.calls() == [install, train]


def test_working_torch_is_kept_and_only_missing_packages_are_pinned(
    sandbox: Sandbox,
) -> None:
    """Oracle: the calls, and the constraints that pip gets: this Python's torch, and the pin that
    it cannot have."""
    sandbox.add_stubs({"python3": "missing hydra-core"})
    (sandbox.path / "python3.sees-torch").touch()
    with (sandbox.checkout / "constraints.txt").open("a") as file:
        file.write("fsdptoys-has-no-such-package==1.0\n")
    venv = sandbox.checkout / ".venv"
    process = sandbox.start("x=1", TORCH=sys.executable)
    assert process.returncode == 0, process.stderr
    assert sandbox.calls() == [
        f"python3 -m venv --system-site-packages {venv}",
        f"python -m pip install -c {venv}/constraints.txt -e {sandbox.checkout}[report]",
        "python -m fsdptoys train x=1",
    ]
    torch = metadata.version("torch")
    assert f"keeps torch {torch} of {sandbox.path}/python3; " in process.stderr
    constraints = (venv / "constraints.txt").read_text().splitlines()
    assert (constraints[0], constraints[-1]) == (
        f"torch=={torch}",
        "fsdptoys-has-no-such-package==1.0",
    )
    pinned = [
        line.split("==")[0]
        for line in constraints[1:]
        if line and not line.startswith("#")
    ]
    assert not {"torch", "numpy", "hydra-core"} & set(pinned)


@pytest.mark.parametrize(
    ("states", "no_venv_module", "sentence"),
    [
        ({"chosen": "old 3.9.2"}, "", r"chosen (3.9.2); install one or set PYTHON="),
        ({}, "", "found none that runs (looked for: chosen)"),
        ({"chosen": "missing torch"}, "1", "apt install python3-venv"),
        (
            {"chosen": "missing torch", "checkout/.venv/bin/python": "old 3.8.1"},
            "",
            "remove that folder",
        ),
    ],
    ids=["too old", "absent", "no venv module", ".venv too old"],
)
def test_missing_python_or_venv_is_reported_in_one_sentence(
    states: dict[str, str], no_venv_module: str, sentence: str, sandbox: Sandbox
) -> None:
    """Oracle: exit status 2, one line with a fix, and no started process."""
    sandbox.add_stubs(states)
    process = sandbox.start("--help", PYTHON="chosen", NO_VENV_MODULE=no_venv_module)
    assert process.returncode == 2
    assert sentence in process.stderr.splitlines()[-1]
    assert sandbox.calls() == []
