"""The package is complete in every form of distribution: wheel, editable install, bare checkout,
source zip."""

import json
import os
import re
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "fsdptoys",
    "models",
    "patches",
    "configs",
]
NO_NETWORK = [
    "--quiet",
    "--no-index",
    "--no-deps",
    "--no-build-isolation",
    "--no-compile",
]

LOOK = """
import importlib, importlib.util, json, site, sys
from importlib.resources import files

folder, libraries, modules = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
site.addsitedir(folder)
sys.path += libraries

def yaml_files(folder, prefix=""):
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from yaml_files(entry, prefix + entry.name + "/")
        elif entry.name.endswith(".yaml") and entry.read_text(encoding="utf-8"):
            yield prefix + entry.name

for name in ("fsdptoys.models", "fsdptoys.patches", "fsdptoys.configs"):
    importlib.import_module(name)
print(json.dumps({
    "file": sys.modules["fsdptoys"].__file__,
    "yaml": sorted(yaml_files(files("fsdptoys.configs"))),
    "missing": [name for name in modules if importlib.util.find_spec(name) is None],
}))
"""
"""Run with -S: an fsdptoys installed in the environment of the tests must not replace the tested
one."""

OWN = """
import json, os, site, sys
site.addsitedir(sys.argv[1])
sys.path += json.loads(sys.argv[2])
os.chdir(sys.argv[3])
from fsdptoys.config.compose import compose_config
model = compose_config(["model=mine"]).model
print(model.name, model.dim)
"""
"""Compose an own file of a project that has no sources."""


def module_names(tree: Path) -> list[str]:
    """Import names of all modules of a source tree."""
    files = [
        path
        for folder in ("fsdptoys", "models", "patches", "configs")
        for path in (tree / folder).rglob("*.py")
    ]
    parts = {path.relative_to(tree).with_suffix("").parts for path in files}
    names = {
        ".".join(part if part[0] == "fsdptoys" else ("fsdptoys", *part))
        for part in parts
    }
    return sorted(name.removesuffix(".__init__") for name in names)


def make_source_zip(archive: Path) -> None:
    """Write a zip like GitHub's, with links as links: of the last commit, or of the files here
    without git."""
    git = [
        "git",
        "-C",
        str(ROOT),
        "archive",
        "--format=zip",
        "-o",
        str(archive),
        "HEAD",
    ]
    try:
        if (ROOT / ".git").exists() and subprocess.run(
            git, capture_output=True
        ).returncode == 0:
            return
    except FileNotFoundError:
        pass  # a machine without git
    with zipfile.ZipFile(archive, "w") as target:
        for path in [
            path for top in SOURCES for path in [ROOT / top, *(ROOT / top).rglob("*")]
        ]:
            if path.is_symlink():
                info = zipfile.ZipInfo(path.relative_to(ROOT).as_posix())
                info.create_system = 3
                info.external_attr = (stat.S_IFLNK | 0o777) << 16
                target.writestr(info, os.readlink(path))
            elif path.suffix != ".pyc" and path.resolve() == path and path.is_file():
                target.write(path, path.relative_to(ROOT))


def unpack(archive: Path, folder: Path, links: bool) -> None:
    """Unpack as ``unzip`` does, or as Python's zipfile and Windows do: with text files in place of
    links."""
    with zipfile.ZipFile(archive) as source:
        source.extractall(folder)
        for info in source.infolist():
            if links and stat.S_ISLNK(info.external_attr >> 16):
                (folder / info.filename).unlink()
                (folder / info.filename).symlink_to(source.read(info).decode())
    assert (folder / "fsdptoys" / "models").is_symlink() == links
    assert (folder / "fsdptoys" / "models").is_file() != links


def run(*command: str) -> str:
    """Run a command in a folder without sources; return its stdout."""
    process = subprocess.run(
        [sys.executable, *command], cwd="/", capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("form", "links"),
    [
        ("wheel", True),
        *(
            pytest.param(form, links, marks=pytest.mark.extended)
            for form, links in (
                ("checkout", True),
                ("source_zip", True),
                ("source_zip", False),
                ("wheel", False),
                ("editable", True),
                ("editable", False),
            )
        ),
    ],
)
def test_every_distribution_contains_models_patches_and_configs(
    form: str, links: bool, tmp_path: Path
) -> None:
    """Oracle: the Python, YAML and other data files of the source tree; nothing but fsdptoys
    may be installed."""
    pytest.importorskip("pip")
    tree = tmp_path / "tree"
    installed = tmp_path / "installed"
    if form == "checkout":
        tree = ROOT
    else:
        make_source_zip(tmp_path / "source.zip")
        unpack(tmp_path / "source.zip", tree, links)
    if form == "wheel":
        # By way of a wheel
        run("-m", "pip", "install", *NO_NETWORK, "--target", str(installed), str(tree))
    elif form == "editable":
        run(
            "-m",
            "pip",
            "install",
            *NO_NETWORK,
            "--target",
            str(installed),
            "--editable",
            str(tree),
        )
    if installed.exists():
        allowed = re.compile(r"(__editable__[._]+)?fsdptoys|bin$|__pycache__$")
        assert [
            path.name for path in installed.iterdir() if not allowed.match(path.name)
        ] == []

    folder = installed if installed.exists() else tree
    home = installed if form == "wheel" else tree
    libraries = [
        path
        for path in sys.path
        if Path(path).name in ("site-packages", "dist-packages")
    ]
    answer = json.loads(
        run(
            "-I",
            "-S",
            "-c",
            LOOK,
            str(folder),
            json.dumps(libraries),
            json.dumps(module_names(tree)),
        )
    )
    assert Path(answer["file"]).is_relative_to(home)
    assert answer["missing"] == []
    configs = tree / "configs"
    assert answer["yaml"] == sorted(
        path.relative_to(configs).as_posix() for path in configs.rglob("*.yaml")
    )
    assert "config.yaml" in answer["yaml"]
    for path in (tree / "fsdptoys").rglob("*"):
        if path.suffix in (".css", ".html", ".js", ".txt", ".pyi", ".typed"):
            assert (home / path.relative_to(tree)).is_file()
    own = tmp_path / "project" / "configs" / "model"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("defaults: [llama_debug, _self_]\ndim: 96\n")
    project = str(own.parents[1])
    answer = run("-I", "-S", "-c", OWN, str(folder), json.dumps(libraries), project)
    assert answer == "mine 96\n"


def test_constraints_pin_every_dependency_of_pyproject() -> None:
    """Oracle: packaging's own reading of requirement lines, for the oldest supported Python and a
    new one."""
    packaging = pytest.importorskip("packaging.requirements")
    arrays = re.findall(
        r"^(?:dependencies|oracle|test) = \[(.*?)\]$",
        (ROOT / "pyproject.toml").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    requirements = [
        packaging.Requirement(line) for line in re.findall(r'"(.+?)"', "".join(arrays))
    ]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [packaging.Requirement(line) for line in lines if not line.startswith("#")]
    for python_version in ("3.10", "3.13"):
        valid = [
            pin
            for pin in pins
            if pin.marker is None
            or pin.marker.evaluate({"python_version": python_version})
        ]
        versions = {pin.name: str(pin.specifier).removeprefix("==") for pin in valid}
        assert len(versions) == len(valid)
        unmet = [
            str(r)
            for r in requirements
            if r.name != "fsdptoys" and versions.get(r.name.lower()) not in r.specifier
        ]
        assert unmet == []
