"""Final weights of a run: written atomically, self-contained, and rejected if incomplete."""

import dataclasses
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from fsdptoys.checkpoint import RunWeights, save_weights, write_hugging_face
from fsdptoys.errors import ConfigError
from tests.checkpoint.damages import SENTENCES, update
from tests.harness.disks import in_child
from tests.harness.families import SMALL
from tests.harness.folders import build, regions_of
from tests.harness.saved_runs import save_run, write_config

CONFIG = SMALL["llama3 scaled tied"]


def parameters_until(end: Callable[[], object]) -> Iterator[tuple[str, Tensor]]:
    """Parameters for several files, then a call of ``end``."""
    for index in range(8):
        yield f"parameter{index}", torch.full((100, 100), float(index))
    end()


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
        write_hugging_face(folder.parent / "export", CONFIG, regions_of(model), torch.float32)
    except ConfigError as error:
        sentences.write_text(f"{sentences.read_text()}\n{error}")
    resource.setrlimit(resource.RLIMIT_FSIZE, before)  # coverage writes its data at exit


def test_full_disk_is_reported_in_one_sentence_and_leaves_no_files(tmp_path: Path) -> None:
    """Oracle: the expected messages and the folder, under the system's own limit on the size of a
    file."""
    (tmp_path / "run").mkdir()
    assert (
        in_child(save_with_little_room, tmp_path / "run" / "weights", tmp_path / "sentences") == 0
    )
    assert list((tmp_path / "run").iterdir()) == []
    for sentence, name in zip(
        (tmp_path / "sentences").read_text().split("\n"), ("weights", "export"), strict=True
    ):
        assert re.fullmatch(
            rf"{tmp_path}/run/{name} cannot be written \(.*File too large.*\), and nothing is left "
            "there; name a folder on a disk with room",
            sentence,
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
    assert refusal(run) == "{}/run holds no weights; train with checkpoint.final_weights=true"
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
    assert refusal(run).startswith("{}/run/config.yaml cannot be read as YAML (while parsing")
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
