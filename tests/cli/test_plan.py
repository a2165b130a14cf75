"""``fsdptoys plan`` on the command line."""

import json
from pathlib import Path

import pytest
import torch

from fsdptoys.cli.main import main
from fsdptoys.config.compose import compose_config
from fsdptoys.device.profile import load_hardware
from fsdptoys.plan.predict import Predictor, predict

TINY = ["model=llama_debug", "experiment=null", "train.seq_len=128", "plan.hardware=h100"]


@pytest.mark.usefixtures("unmeasured")
def test_memory_at_the_end_of_a_step_is_12_bytes_per_sharded_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: float32 parameter and two states of AdamW over 8 ranks, and a workspace of cuBLAS for each of 2 threads,
    32 MiB on Hopper (torch.backends.cuda, CUBLAS_WORKSPACE_CONFIG); at most 10% more for small tensors."""
    assert main(["plan", *TINY, "model.dim=512", "model.ffn_dim=1408", "plan.world_size=8", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    config = compose_config([*TINY, "model.dim=512", "model.ffn_dim=1408"])
    with torch.device("meta"):
        parameters = config.model.build().parameter_counts().total
    kept = 12 * parameters / 8
    assert kept <= output["memory"]["end_bytes"] - 2 * 2**25 < 1.1 * kept
    assert output["world_size"] == 8 and output["method"] == "traced, all layers"
    parts = ("compute", "exposed_communication", "exposed_transfer", "host")
    assert sum(output["time"][f"{part}_seconds"] for part in parts) == pytest.approx(output["time"]["step_seconds"])
    assert output["memory_limit_bytes"] == round(load_hardware("h100").usable_bytes)


@pytest.mark.extended
@pytest.mark.usefixtures("unmeasured")
def test_peaks_of_deep_models_only_are_found_by_tracing_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the trace of all layers is printed, where gradients outgrow the logits behind the 12th layer; their
    peak is 1% higher than the line through 8 and 12 layers predicts. The threshold is lowered to find it."""
    made = []
    monkeypatch.setattr("fsdptoys.plan.predict.HIGHER", 0.005)
    call = Predictor.__call__
    monkeypatch.setattr(Predictor, "__call__", lambda self, on: made.append(call(self, on)) or made[-1])
    words = ["model=llama_debug", "model.n_layers=30", "model.dim=256", "model.vocab_size=2560", "experiment=null"]
    words += ["parallel=single", "train.seq_len=512", "memory.gradient_checkpointing=full"]
    config, hardware = compose_config([*words, "optim.implementation=fused"]), load_hardware("h100")
    config.validate(1, "cuda")
    output = predict(config, hardware, 1)
    line, _ = made
    assert (line.method, output.method) == ("traced, 8 and 12 layers", "traced, all layers")
    assert output.memory.peak_bytes > 1.005 * line.memory.peak_bytes


@pytest.mark.usefixtures("unmeasured")
def test_search_prints_overrides_accepted_by_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the configuration composed from the printed overrides, and the written plot."""
    picture = tmp_path / "frontier.png"
    words = ["plan", "search", *TINY, "parallel=fsdp2", "train.batch_size=4", "plan.world_size=8", "mesh.fsdp_size=8"]
    words += ["memory.cpu_offload=false", "memory.optimizer_offload=false", "memory.gradient_checkpointing=full"]
    words += ["parallel.wrap=block", "parallel.reshard_after_forward=default"]
    assert main([*words, "--json", "--png", str(picture)]) == 0
    output = json.loads(capsys.readouterr().out)
    best = compose_config(output["best"]["words"])
    best.validate(8, "cuda")
    assert (best.parallel.name, best.train.batch_size, best.model.name) == ("fsdp2", 4, "llama_debug")
    assert picture.read_bytes().startswith(b"\x89PNG")
