"""The launcher: resolution of a command line to a run on the present hardware."""

from types import SimpleNamespace
from typing import Any

import pytest

from fsdptoys.cli.train import _work
from fsdptoys.errors import ConfigError
from fsdptoys.launch.hardware import FoundHardware
from fsdptoys.launch.launch import (
    check_master,
    choose_experiment,
    describe_run,
    print_run,
    resolve_run,
)
from fsdptoys.launch.worker import WorkerRequest


@pytest.mark.parametrize(
    "device_type, world_size, experiment",
    [
        ("cpu", 64, "cpu_text"),
        ("cuda", 8, "llama2_7b"),
        ("npu", 16, "llama2_7b"),
        ("cuda", 7, "llama3_1b"),
    ],
)
def test_hardware_determines_the_default_experiment(
    device_type: str, world_size: int, experiment: str
) -> None:
    """Oracle: the table."""
    assert choose_experiment(device_type, world_size) == experiment


TWO_NODES = ["launch.nproc_per_node=3", "launch.nnodes=2", "launch.rdzv_endpoint=x:1"]
TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "overrides, present, world_size, local_ranks",
    [
        ([], {}, 2, 2),
        (["parallel=single"], {}, 1, 1),
        (TWO_NODES, {}, 6, 3),
        (["launch.nproc_per_node=3"], TORCHRUN, 4, 2),
        (["launch.nproc_per_node=${train.grad_accum}"], {}, 1, 1),
    ],
)
def test_world_size_follows_device_settings_and_torchrun(
    overrides: list[str], present: dict[str, str], world_size: int, local_ranks: int
) -> None:
    """Oracle: two ranks on a CPU, one for ``single``, the configured number, or what it refers to,
    and torchrun's numbers first of all."""
    run = resolve_run(["launch.device=cpu", *overrides], present)
    assert (run.hardware.device_type, run.world_size, run.local_ranks) == (
        "cpu",
        world_size,
        local_ranks,
    )


@pytest.mark.parametrize(
    "overrides, present, size",
    [
        (TWO_NODES, {}, 3),
        ([], TORCHRUN | {"GROUP_WORLD_SIZE": "2"}, 2),
    ],
)
def test_node_fsdp_size_equals_the_ranks_per_node(
    overrides: list[str], present: dict[str, str], size: int
) -> None:
    """Oracle: the ranks of a machine, as the settings or torchrun have them."""
    run = resolve_run(["mesh.fsdp_size=node", "launch.device=cpu", *overrides], present)
    assert run.composition.config.mesh.fsdp_size == size


@pytest.mark.parametrize("size, printed", [(2, True), ("node", False)])
def test_shard_groups_across_nodes_are_reported(
    size: object, printed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the expected message after the hardware line."""
    print_run(
        resolve_run([f"mesh.fsdp_size={size}", "launch.device=cpu", *TWO_NODES], {}), {}
    )
    sentence = "mesh.fsdp_size=2 on nodes of 3 ranks has groups that lie"
    assert (sentence in capsys.readouterr().out) == printed


FROM = "in the environment must be a number from"
THREADS = "in the environment must be a number of threads, 1 to 999; "
REFUSED = {
    "WORLD_SIZE=٤": f"WORLD_SIZE=٤ {FROM} 1 to 16777216; start the ranks",
    f"WORLD_SIZE={'9' * 5000}": f"WORLD_SIZE=9{{299}}… {FROM} 1 to 16777216; ",
    "RANK=5": f"RANK=5 {FROM} 0 to 3; start the ranks ",
    "LOCAL_RANK=-": f"LOCAL_RANK=nothing {FROM} 0 to 1; ",
    "LOCAL_WORLD_SIZE=5": f"LOCAL_WORLD_SIZE=5 {FROM} 1 to 4; ",
    **{
        f"OMP_NUM_THREADS={value}": f"OMP_NUM_THREADS={value} {THREADS}"
        for value in ("0", "abc", "4,0", "99999")
    },
    "mesh.fsdp_size=node LOCAL_WORLD_SIZE=-": (
        "mesh.fsdp_size=node needs to know the ranks of each machine, and LOCAL_"
    ),
    "mesh.fsdp_size=node GROUP_WORLD_SIZE=3": (
        "mesh.fsdp_size=node needs equally many ranks on each machine, and 3 machines, this one "
        "with 2 ranks, have 4 together; give torchrun the same"
    ),
    "plan.rows=3": "plan.rows=3 is for fsdptoys plan and does nothing in a run; leave it out$",
    "plan.hardware=h100": (
        "plan.hardware=h100 is of type cuda, and this run is on cpu; leave it out, or ask "
        "fsdptoys plan$"
    ),
    "plan.hardware=cpu plan.predict=false": (
        "plan.hardware=cpu does nothing with plan.predict=false; leave out one of them$"
    ),
    "launch.nproc_per_node=100000 RANK=-": (
        r"launch.nproc_per_node=100000 is over 32 for each of \d+ cores; set"
    ),
}
"""Overrides and variables, in addition to torchrun's (a dash removes one) → the message."""


@pytest.mark.parametrize("line", REFUSED, ids=lambda line: line[:50])
def test_invalid_settings_and_variables_are_refused(line: str) -> None:
    """Oracle: the expected message; without LOCAL_RANK every rank would take the first device, and
    ranks that cut the mesh differently would wait for each other."""
    assignments = [tuple(word.split("=")) for word in line.split()]
    variables = TORCHRUN | {
        name: value for name, value in assignments if name.isupper()
    }
    overrides = [f"{name}={value}" for name, value in assignments if not name.isupper()]
    with pytest.raises(ConfigError, match=f"^{REFUSED[line]}"):
        resolve_run(
            [*overrides, "launch.device=cpu"],
            {name: value for name, value in variables.items() if value != "-"},
        )


def test_invalid_master_address_or_port_is_refused() -> None:
    """Oracle: the expected message; one rank needs no place to meet."""
    check_master({"WORLD_SIZE": "1"})
    with pytest.raises(
        ConfigError, match=r"^MASTER_ADDR=nothing in the environment must name the"
    ):
        check_master(TORCHRUN)
    with pytest.raises(ConfigError, match=f"^MASTER_PORT=65536 {FROM} 1 to 65535; "):
        check_master(TORCHRUN | {"MASTER_ADDR": "x", "MASTER_PORT": "65536"})


def test_run_description_names_hardware_and_choices() -> None:
    """Oracle: the line, word for word, for a run on made-up hardware."""
    run = resolve_run(["parallel=fsdp1", "launch.device=cpu"], {})
    made_up = SimpleNamespace(
        composition=run.composition,
        hardware=FoundHardware("cuda", 2, "NVIDIA H200", 16),
        world_size=2,
        by_hardware=True,
    )
    assert describe_run(made_up, {"OMP_NUM_THREADS": "8"}) == (  # type: ignore[arg-type]
        "found 2 × NVIDIA H200, 16 cores; running experiment=cpu_text model=llama_bytes "
        "data=text with fsdp1 on 2 ranks, OMP_NUM_THREADS=8; experiment=cpu_text: the default of "
        "this hardware, since neither model nor data are named"
    )
    chosen = resolve_run(["memory=lean", "mesh=hsdp", "launch.device=cpu"], {})
    assert "data=text memory=lean mesh=hsdp with fsdp2 on 2 ranks" in describe_run(
        chosen, {}
    )


def have(monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    """Be a machine with so many GPUs, or with a CPU alone."""
    hardware = FoundHardware("cuda" if devices else "cpu", devices, "NVIDIA H200", 16)
    monkeypatch.setattr("fsdptoys.launch.launch.find_hardware", lambda choice: hardware)


@pytest.mark.parametrize(
    ("overrides", "devices", "name"),
    [
        (["model=llama3_1b"], 1, "single"),
        (["experiment=llama3_1b", "memory=none"], 1, "single"),
        (["model=llama3_1b", "launch.nproc_per_node=1"], 2, "single"),
        (["model=llama3_1b", "parallel=fsdp2"], 1, "fsdp2"),
        (["model=llama3_1b", "memory.cpu_offload=true"], 1, "fsdp2"),
        (["model=llama3_1b", "parallel.reshard_after_forward=never"], 1, "fsdp2"),
        (["model=llama3_1b"], 2, "fsdp2"),
        ([], 1, "fsdp2"),
    ],
)
def test_one_accelerator_trains_without_sharding_unless_the_words_ask_for_it(
    overrides: list[str],
    devices: int,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the table; the first lines give the reason, and a preset chosen by the planner keeps
    its strategy."""
    have(monkeypatch, devices)
    run = resolve_run(overrides, {})
    assert run.composition.config.parallel.name == name
    assert ("parallel=single" in run.overrides) is (name == "single")
    print_run(run, {})
    reason = (
        "parallel=single since one rank has no ranks to shard over; type "
        "parallel=fsdp2 for FSDP2"
    )
    assert (reason in capsys.readouterr().out) is (name == "single")


TRAINING = ("model", "data", "optim", "tune", "train", "memory", "mesh")
"""Sections that decide what is trained, and how much memory it takes."""


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=llama_debug"],
        ["data=text", "memory=lean"],
        ["model.n_layers=2", "train.steps=3"],
        ["tune=lora", "data=text"],
        ["experiment=cpu_compare"],
    ],
    ids=" ".join,
)
def test_command_that_names_a_part_of_an_experiment_trains_the_same_on_every_machine(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the run without an accelerator; only device and strategy of one accelerator
    differ."""

    def settings(devices: int) -> dict[str, Any]:
        have(monkeypatch, devices)
        run = resolve_run(overrides, {})
        tree = run.composition.config.to_dict()
        one = devices == 1 and tree["parallel"]["name"] == "single"
        return (
            {name: tree[name] for name in TRAINING}
            | {"param_dtype": tree["parallel"]["param_dtype"]}
            | ({} if one else {"parallel": tree["parallel"]})
        )

    expected = settings(0)
    for devices in (1, 4, 8):
        assert settings(devices).items() <= expected.items(), devices


@pytest.mark.parametrize(
    ("overrides", "defaults"),
    [
        (
            ["model=llama_debug"],
            "seq_len 512, steps 10, batch_size 1, lr 0.0003, param_dtype float32",
        ),
        (
            ["model=llama3_8b", "train.batch_size=4", "optim.lr=1e-3"],
            "seq_len 4,096, steps 10, pa",
        ),
    ],
)
def test_first_line_names_each_default(overrides: list[str], defaults: str) -> None:
    """Oracle: the settings that are not typed, in their order."""
    line = describe_run(resolve_run([*overrides, "launch.device=cpu"], {}), {})
    assert f" with fsdp2 on 2 ranks; {defaults}" in line
    assert line.endswith(": the defaults on every machine")


@pytest.mark.parametrize(
    ("overrides", "chosen"),
    [
        (["model=llama3_1b", "memory=auto"], True),
        (["model=llama3_1b"], False),
        (["model=llama3_1b", "memory=lean"], False),
        ([], False),
    ],
)
def test_memory_switches_are_chosen_only_where_the_words_ask_for_it(
    overrides: list[str], chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the table; the stand-in for the planner chooses a value that no file has."""
    have(monkeypatch, 2)
    run = resolve_run(
        overrides,
        {},
        choose_switches=lambda *_: ["memory.chunk_loss=true", "memory.chunk_tokens=77"],
    )
    assert (run.composition.config.memory.chunk_tokens == "77") is chosen
    assert ("memory.chunk_tokens=77" in run.overrides) is chosen


def test_unexpected_world_size_across_nodes_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the expected message; a launcher assumes equal numbers of ranks on all machines."""
    overrides = [
        "launch.nproc_per_node=2",
        "launch.nnodes=2",
        "launch.rdzv_endpoint=x:1",
        "launch.device=cpu",
    ]
    run = resolve_run(overrides, {})
    request = WorkerRequest(
        run.composition.config, run.hardware, run.local_ranks, run.world_size
    )
    monkeypatch.setattr("fsdptoys.launch.worker.read_request", lambda: request)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError) as caught:
        _work(overrides)
    assert str(caught.value) == (
        "launch.nnodes=2 machines of 2 ranks were expected, and 3 ranks have come; set "
        "launch.nproc_per_node to the same on each"
    )


@pytest.mark.parametrize("overrides", [[], ["experiment=cpu_text"]])
def test_reference_to_the_device_has_its_final_value(overrides: list[str]) -> None:
    """Oracle: the device of the run."""
    run = resolve_run(
        [
            *overrides,
            "metrics.run_dir=runs/${launch.device}",
            "launch.nproc_per_node=1",
        ],
        {},
    )
    assert (
        run.composition.config.metrics.run_dir
        == f"runs/DeviceChoice.{run.hardware.device_type}"
    )
