"""Final weights of a run: written atomically, self-contained, and rejected if incomplete."""

import dataclasses
import re
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import yaml
from torch import Tensor

from fsdptoys.checkpoint import (
    RunWeights,
    save_weights,
    verify_checksums,
    write_hugging_face,
)
from fsdptoys.errors import ConfigError
from fsdptoys.models import whole
from tests.checkpoint.damages import SENTENCES, update
from tests.harness.disks import in_child, kill_self
from tests.harness.families import SMALL
from tests.harness.folders import build, regions_of
from tests.harness.process_memory import NEEDS_PEAK, peak_growth_bytes
from tests.harness.saved_runs import FILE_BYTES, save_run, write_config

CONFIG = SMALL["llama3 scaled tied"]


@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize("file_bytes", [2**31, FILE_BYTES])
def test_saved_weights_round_trip_bitwise(
    case: str, file_bytes: int, tmp_path: Path
) -> None:
    """Oracle: the parameters and the configuration before they were written."""
    parameters = save_run(tmp_path / "run", SMALL[case], file_bytes)
    files = sorted(file.name for file in (tmp_path / "run" / "weights").iterdir())
    assert (
        ("weights.safetensors" in files)
        == (file_bytes > FILE_BYTES)
        == (len(files) == 2)
    )
    for path in (tmp_path / "run", tmp_path / "run" / "weights"):
        weights = RunWeights(path)
        assert weights.config == SMALL[case]
        assert verify_checksums(weights.path) == len(files) - 1
        assert set(weights.tensors.stored) == set(parameters)
        for name, param in parameters.items():
            assert torch.equal(weights.read(name, whole(tuple(param.shape))), param)


def test_runs_of_versions_without_later_settings_are_read(tmp_path: Path) -> None:
    """Oracle: the configuration; ``config.yaml`` of the first version lacks these keys."""
    later = ("kind", "beta_fast", "beta_slow", "attention_factor", "truncate")
    save_run(tmp_path / "run", CONFIG)
    file = tmp_path / "run" / "config.yaml"
    tree = yaml.safe_load(file.read_text())
    for key in later:
        del tree["model"]["rope_scaling"][key]
    for key in ("attention_bias", "mlp_bias"):
        del tree["model"][key]
    file.write_text(yaml.safe_dump(tree))
    assert RunWeights(tmp_path / "run").config == CONFIG


def parameters_until(end: Callable[[], object]) -> Iterator[tuple[str, Tensor]]:
    """Parameters for several files, then a call of ``end``."""
    for index in range(8):
        yield f"parameter{index}", torch.full((100, 100), float(index))
    end()


def fail() -> None:
    raise RuntimeError("a rank was lost")


def test_interrupted_save_leaves_no_weights_folder(tmp_path: Path) -> None:
    """Oracle: no folder after a kill in the middle or an error; the next attempt succeeds."""
    folder = tmp_path / "run" / "weights"
    assert (
        in_child(save_weights, folder, parameters_until(kill_self), FILE_BYTES)
        == -signal.SIGKILL
    )
    left = [file.name for file in folder.parent.iterdir()]
    assert len(left) == 1 and re.fullmatch(r"\.weights\.[0-9a-f]{8}\.partial", left[0])

    with pytest.raises(RuntimeError, match="a rank was lost"):
        save_weights(folder, parameters_until(fail), FILE_BYTES)
    assert [file.name for file in folder.parent.iterdir()] == left

    summary = save_weights(folder, parameters_until(lambda: None), FILE_BYTES)
    assert (len(summary.files), summary.parameters, summary.tensor_bytes) == (
        8,
        80_000,
        320_000,
    )


def save_with_little_room(folder: Path, sentences: Path) -> None:
    # Writing beyond this gives an error, as a full disk does.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    exhausted = []
    try:
        save_weights(folder, parameters_until(lambda: exhausted.append(True)))
    except ConfigError as error:
        assert exhausted
        sentences.write_text(str(error))
    model = build(CONFIG)
    try:
        write_hugging_face(
            folder.parent / "export", CONFIG, regions_of(model), torch.float32
        )
    except ConfigError as error:
        sentences.write_text(f"{sentences.read_text()}\n{error}")
    # coverage writes its data at exit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_is_reported_in_one_sentence_and_leaves_no_files(
    tmp_path: Path,
) -> None:
    """Oracle: the expected messages and the folder, under the system's own limit on the size of a
    file."""
    (tmp_path / "run").mkdir()
    assert (
        in_child(
            save_with_little_room, tmp_path / "run" / "weights", tmp_path / "sentences"
        )
        == 0
    )
    assert list((tmp_path / "run").iterdir()) == []
    for sentence, name in zip(
        (tmp_path / "sentences").read_text().split("\n"),
        ("weights", "export"),
        strict=True,
    ):
        assert re.fullmatch(
            rf"{tmp_path}/run/{name} cannot be written \(.*File too large.*\), and nothing is left "
            "there; name a folder on a disk with room",
            sentence,
        )


def test_existing_content_is_never_overwritten(tmp_path: Path) -> None:
    """Oracle: the messages and the earlier content; an empty folder may be filled."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name, what in {"full": "is not empty", "file": "is a file"}.items():
        with pytest.raises(ConfigError) as refused:
            save_weights(tmp_path / name, parameters_until(lambda: None))
        assert str(refused.value) == (
            f"{tmp_path / name} {what}, and nothing is written over; name a folder that does not "
            "exist"
        )
    assert (
        (tmp_path / "full" / "mine").read_text()
        == (tmp_path / "file").read_text()
        == "mine"
    )
    (tmp_path / "empty").mkdir()
    save_weights(tmp_path / "empty", parameters_until(lambda: None))
    assert sorted(file.name for file in (tmp_path / "empty").iterdir()) == [
        "checksums.json",
        "weights.safetensors",
    ]


def save_and_measure(folder: Path, result: Path) -> None:
    def parameters() -> Iterator[tuple[str, Tensor]]:
        for index in range(24):
            yield f"parameter{index}", torch.full((1024, 1024), float(index))

    # triggers lazy imports
    save_weights(folder.parent / "first", parameters_until(lambda: None))
    growth = peak_growth_bytes(
        lambda: save_weights(folder, parameters(), max_file_bytes=2**25)
    )
    result.write_text(str(growth))


@NEEDS_PEAK
def test_writing_holds_one_file_in_memory(tmp_path: Path) -> None:
    """Oracle: Linux's own peak: 32 MiB of a file, two parameters of 4 MiB, 16 MiB for all else; of
    96 MiB."""
    # Before 0.8 the library copied the tensors.
    copies = (
        1 if tuple(map(int, safetensors.__version__.split(".")[:2])) >= (0, 8) else 2
    )
    assert in_child(save_and_measure, tmp_path / "weights", tmp_path / "result") == 0
    assert (
        2**25
        <= int((tmp_path / "result").read_text())
        <= copies * 2**25 + 2 * 2**22 + 2**24
    )


@pytest.mark.parametrize("row", SENTENCES["models of runs"], ids=str)
def test_invalid_edits_of_the_configuration_are_refused(
    row: dict[str, Any], tmp_path: Path
) -> None:
    """Oracle: the expected message."""
    save_run(tmp_path, CONFIG)
    tree = yaml.safe_load((tmp_path / "config.yaml").read_text())
    update(tree["model"], row["keys"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError) as refused:
        RunWeights(tmp_path)
    assert str(refused.value) == f"{tmp_path}/config.yaml{row['says']}"


def test_runs_with_incomplete_weights_are_refused(tmp_path: Path) -> None:
    """Oracle: the expected messages."""

    def refusal(path: Path) -> str:
        with pytest.raises(ConfigError) as refused:
            RunWeights(path)
        return str(refused.value).replace(str(tmp_path), "{}")

    assert (
        refusal(tmp_path / "no")
        == "{}/no is not a folder, and the directory of a run is expected; name one"
    )
    run = tmp_path / "run"
    write_config(run, CONFIG)
    assert (
        refusal(run)
        == "{}/run holds no weights; train with checkpoint.final_weights=true"
    )
    save_run(run, CONFIG)
    other = dataclasses.replace(CONFIG, ffn_dim=100)
    write_config(run, other)
    assert refusal(run).endswith(
        "holds layers.0.mlp.gate_proj.weight in the shape 112×64, and the model of config.yaml "
        "needs 100×64; download or write the folder again"
    )
    write_config(run, dataclasses.replace(CONFIG, n_layers=2))
    assert (
        "for which the model of config.yaml has no place; use the config.yaml that the run wrote"
        in refusal(run)
    )
    (run / "config.yaml").write_text("model: [")
    assert refusal(run).startswith(
        "{}/run/config.yaml cannot be read as YAML (while parsing"
    )
    (run / "config.yaml").write_text("model: 3")
    assert (
        refusal(run)
        == "{}/run/config.yaml lacks the section model; use the file that the run wrote"
    )
    (run / "config.yaml").unlink()
    assert refusal(run) == (
        "{}/run/config.yaml cannot be read (No such file or directory), and should describe the "
        "model of the weights; restore it"
    )
