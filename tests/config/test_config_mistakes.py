"""Every mistake gets one sentence that names key, value and fix, before any process group or allocation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdptoys.config.compose import compose_config
from fsdptoys.errors import ConfigError
from fsdptoys.metrics import check_run_dir

ROOT = Path(__file__).parents[2]

MISTAKES = {
    # Arguments without a key or a value.
    "train.steps": "train.steps has no value; write train.steps=10, for example",
    "fsdp1": "fsdp1 has no value; write parallel=fsdp1",
    "lr = 1": "lr has no value; write optim.lr=1 without spaces",
    "train.steps= 1": "'train.steps=' has spaces before or after the = sign; write train.steps=1",
    "= 5": "'=' has spaces before or after the = sign; write KEY=5",
    "--train.steps=1": "--train.steps=1 is not an option, since settings have no dashes before them; "
    "write train.steps=1",
    "--multirun": "--multirun is not an option, since settings have no dashes before them; "
    "see fsdptoys train --help for all keys",
    "~train.steps": "~train.steps would take a key away, which every run needs; write KEY=null or a value instead",
    "train.steps=1,2": "train.steps=1,2 gives several values, a run takes one; write train.steps=1",
    "optim.lr=choice(1,2)": "optim.lr=choice(1,2) gives several values, a run takes one; write optim.lr=1",
    "data.sample_prompt=x:{": "data.sample_prompt=x:{ cannot be read (extraneous input '{' expecting <EOF>); "
    "put quotes around the value: 'data.sample_prompt=\"...\"'",
    # Keys.
    "train.lrr=1": "train.lrr=1 names a key that does not exist; did you mean optim.lr=1?",
    "train.step=1": "train.step=1 names a key that does not exist; did you mean train.steps=1?",
    "steps=1": "steps=1 names a key that does not exist; did you mean train.steps=1?",
    "modle=llama_debug": "modle=llama_debug names a key that does not exist; did you mean model=llama_debug?",
    "+train.lrr=1": "+train.lrr=1 names a key that does not exist; did you mean optim.lr=1?",
    "zzzz=1": "zzzz=1 names a key that does not exist; see fsdptoys train --help for all keys",
    "+train.steps=1": "+train.steps=1 would add a key that exists already; write train.steps=1",
    "+experiment=cpu_text": "+experiment=cpu_text would add a key that exists already; write experiment=cpu_text",
    "model@other=llama_debug": "model@other=llama_debug names a package, and every group has its fixed place; "
    "write model=llama_debug",
    "parallel=ddp parallel.wrap=block": "parallel.wrap=block is not an option of parallel=ddp, "
    "it belongs to fsdp1, fsdp2, toy_fsdp; set parallel=fsdp1 or leave it out",
    "optim.momentum=0.5": "optim.momentum=0.5 is not an option of optim=adamw, it belongs to muon, sgd; "
    "set optim=muon or leave it out",
    "optim.ns_steps=6": "optim.ns_steps=6 is not an option of optim=adamw, it belongs to muon; set optim=muon or leave "
    "it out",
    "optim=muon optim.ns_steps=0": "optim.ns_steps=0 must be between 1 and 99; set optim.ns_steps=1",
    "optim=muon optim.momentum=1": "optim.momentum=1.0 must be at least 0 and below 1; set optim.momentum=0.95",
    "model.top_k=2": "model.top_k=2 is not an option of model=llama_debug, it belongs to llama4_debug, llama4_mini, "
    "llama4_scout, qwen3_moe_30b_a3b, qwen3_moe_debug, qwen3_moe_mini; set model=llama4_debug or leave it out",
    "experiment.top_k=2": "experiment.top_k=2 names a key that does not exist; did you mean model=llama4_debug "
    "model.top_k=2?",
    "train=fast": "train=fast sets a whole section, but keys are set one by one; set for example train.batch_size=1",
    "hydra.run.dir=x": "hydra.run.dir=x is Hydra's own setting, which every rank needs as it is; leave it out",
    "+model._target_=os.system": "+model._target_=os.system would run code that the configuration names, "
    "which is not supported; leave it out",
    # Choices.
    "model=llama3_9b": "model=llama3_9b must be a preset that fsdptoys models lists; did you mean model=llama3_8b?",
    "model=null": "model=null must be a preset that fsdptoys models lists; set model=llama_debug",
    "parallel=zero": "parallel=zero must be one of ddp, fsdp1, fsdp2, single, toy_cp, toy_ddp, toy_ep, toy_fsdp, "
    "toy_zero1, toy_zero2, toy_zero3; did you mean parallel=toy_zero3?",
    "experiment=llama_7b": "experiment=llama_7b must be one of cpu_compare, cpu_text, llama2_7b, llama3_1b or null; "
    "did you mean experiment=llama2_7b?",
    # Types.
    "train.steps=1e3": "train.steps=1e3 must be an integer; set train.steps=1000",
    'train.steps="5"': 'train.steps="5" must be an integer; set train.steps=5',
    "train.steps='5.0'": "train.steps='5.0' must be an integer; set train.steps=5",
    "train.steps=0x10": "train.steps=0x10 must be an integer; set train.steps=16",
    "train.steps=007": "train.steps=007 must be an integer; set train.steps=7",
    "train.steps=1e400": "train.steps=1e400 must be an integer; set train.steps=10",
    "train.steps=1,000": "train.steps=1,000 gives several values, a run takes one; write train.steps=1000",
    f"train.steps={'9' * 5000}": "train.steps has a number of 5000 digits; write train.steps=VALUE with fewer",
    "optim.lr='3e-4'": "optim.lr='3e-4' must be a finite number; set optim.lr=0.0003",
    f"optim.lr=1{'0' * 400}": f"optim.lr=1{'0' * 400} must be a finite number; set optim.lr=0.0003",
    "memory.cpu_offload=yes": "memory.cpu_offload=yes must be true or false; set memory.cpu_offload=true",
    "memory.cpu_offload='False'": "memory.cpu_offload='False' must be true or false; set memory.cpu_offload=false",
    "launch.device=gpu": "launch.device=gpu must be one of auto, cuda, npu, cpu; did you mean launch.device=cuda?",
    "launch.device=CPU": "launch.device=CPU must be one of auto, cuda, npu, cpu; did you mean launch.device=cpu?",
    "parallel.param_dtype=fp32": "parallel.param_dtype=fp32 must be one of float32, bfloat16, float16; did you "
    "mean parallel.param_dtype=float32?",
    "train.steps=1000000000001": "train.steps=1000000000001 must be at most 1000000000000; set train.steps to that or "
    "less",
    "model.n_layers=1000000000": "model.n_layers=1000000000 must be at most 10000; set model.n_layers to that or less",
    "train.batch_size=1000000000000": "train.batch_size=1000000000000 must be at most 1048576; set train.batch_size "
    "to that or less",
    "train.steps=many": "train.steps=many must be an integer; set train.steps=10",
    "train.steps=true": "train.steps=true must be an integer; set train.steps=10",
    "train.steps=null": "train.steps=null must be an integer; set train.steps=10",
    "optim.lr=fast": "optim.lr=fast must be a finite number; set optim.lr=0.0003",
    "optim.lr=nan": "optim.lr=nan must be a finite number; set optim.lr=0.0003",
    "train.max_grad_norm=inf": "train.max_grad_norm=inf must be a finite number or null; set train.max_grad_norm=1.0",
    "memory.cpu_offload=2": "memory.cpu_offload=2 must be true or false; "
    "set memory.cpu_offload=true or memory.cpu_offload=false",
    "parallel.wrap=blok": "parallel.wrap=blok must be one of auto, block, block_attn_mlp; did you "
    "mean parallel.wrap=block?",
    "launch.device=metal": "launch.device=metal must be one of auto, cuda, npu, cpu; set launch.device=auto",
    "data=text data.files=x.txt": "data.files=x.txt must be a list; set data.files=[x.txt]",
    "data=text data.files=[null]": "data.files=[null] must be a list; set data.files=[stdlib]",
    "data=text data.sample_prompt=null": "data.sample_prompt=null must be text; "
    "set data.sample_prompt='def read(self, size=-1):'",
    "train.steps=${nothing}": "train.steps=${nothing} cannot be resolved (Interpolation key 'nothing' not found); "
    "write the value itself",
    # Values.
    "train.batch_size=0": "train.batch_size=0 must be at least 1; set train.batch_size=1",
    "optim.lr=-1": "optim.lr=-1.0 must be at least 0; set optim.lr=0.0003",
    "model.n_heads=3": "model.n_heads=3 must divide model.dim=64 into heads of even width; "
    "set model.dim to a multiple of 6",
    "memory.cpu_offload=true memory.optimizer_offload=true": "memory.cpu_offload=true and "
    "memory.optimizer_offload=true exclude each other, since CPU offload already keeps the optimizer states in host "
    "memory; set memory.optimizer_offload=false",
    "launch.nproc_per_node=0": "launch.nproc_per_node=0 must be at least 1, or -1; set launch.nproc_per_node=-1",
    "launch.nnodes=2": "launch.nnodes=2 needs a rendezvous; set launch.rdzv_endpoint=HOST:29400 to the first "
    "node's name",
    "model=qwen3_debug model.head_dim=7": "model.head_dim=7 must be even, since its channels are rotated in pairs; "
    "set model.head_dim=8",
    "model=gpt2_debug model.n_heads=3": "model.n_heads=3 must divide model.dim=64; set model.dim to a multiple of 3",
    "model=gpt2_debug model.ffn_dim=0": "model.ffn_dim=0 must be at least 1; set model.ffn_dim=null",
    "model=qwen3_moe_debug model.n_experts=0": "model.n_experts=0 must be at least 1; set model.n_experts=128",
    "model=qwen3_moe_debug model.router_z_loss_coef=-1": "model.router_z_loss_coef=-1.0 must be at least 0; set "
    "model.router_z_loss_coef=0.0",
    "model=llama4_debug model.attention_chunk_len=0": "model.attention_chunk_len=0 must be at least 1; set "
    "model.attention_chunk_len=8192",
    "model=llama4_debug model.temperature_scale=0": "model.temperature_scale=0.0 must be above 0; set "
    "model.temperature_scale=0.1",
    "model.init_from=''": "model.init_from='' must name a folder; set model.init_from=null to draw values",
    "model.init_from=missing": "model.init_from=missing does not exist, where a folder in Hugging Face format is "
    "expected; name one that holds config.json and safetensors files",
}


def compose_and_validate(words: list[str]) -> None:
    config = compose_config(words)
    check_run_dir(config.metrics)
    config.validate(world_size=2, device_type="cpu")


@pytest.mark.parametrize("typed", MISTAKES)
def test_mistakes_are_reported_in_one_sentence(typed: str) -> None:
    """Oracle: the exact message."""
    with pytest.raises(ConfigError) as caught:
        compose_and_validate(typed.split(" "))
    assert str(caught.value) == MISTAKES[typed]


def test_defaults_are_valid() -> None:
    """Oracle: no error."""
    compose_and_validate([])


@pytest.mark.launcher
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "words, sentence",
    [
        (
            ["train", "experiment=null", "train.seq_len=1024"],
            "train.seq_len=1024 is over the model's model.max_seq_len=512; set train.seq_len=512",
        ),
        (["trian"], "trian is not a command; did you mean fsdptoys train?"),
    ],
)
def test_command_prints_one_line_and_exits_with_2(words: list[str], sentence: str, tmp_path: Path) -> None:
    """Oracle: the full stderr of the real command."""
    done = subprocess.run(
        [sys.executable, "-m", "fsdptoys", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"fsdptoys: {sentence}\n")
