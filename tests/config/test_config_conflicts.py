"""Settings that exclude each other are refused in one sentence, before any process group or allocation."""

import importlib.util
from pathlib import Path

import pytest
import torch

from fsdptoys.config import optimizer_checks
from fsdptoys.config.compose import compose_config
from fsdptoys.device import available_cores
from fsdptoys.errors import ConfigError
from fsdptoys.memory import SAVED_OPERATORS
from fsdptoys.metrics import check_run_dir
from fsdptoys.parallel.fsdp import TORCH

CONFLICTS = {
    # Optimizers.
    "optim=muon optim.momentum=0": "optim.nesterov=true needs momentum; set optim.momentum=0.95 or "
    "optim.nesterov=false",
    "optim=muon optim.beta2=1": "optim.beta2=1.0 must be at least 0 and below 1; set optim.beta2=0.95",
    "optim=muon optim.adamw_lr=-1": "optim.adamw_lr=-1.0 must be at least 0; set optim.adamw_lr=null",
    "optim=muon parallel=fsdp1": "optim=muon orthogonalizes full matrices, which parallel=fsdp1 cuts elsewhere than "
    "between rows; set parallel=fsdp2 or optim=adamw",
    "optim=muon parallel=toy_zero1": "optim=muon orthogonalizes full matrices, which parallel=toy_zero1 cuts "
    "elsewhere than between rows; set parallel=fsdp2 or optim=adamw",
    "optim=muon parallel=toy_zero2": "optim=muon orthogonalizes full matrices, which parallel=toy_zero2 cuts "
    "elsewhere than between rows; set parallel=fsdp2 or optim=adamw",
    "optim=muon parallel=toy_zero3": "optim=muon orthogonalizes full matrices, which parallel=toy_zero3 keeps on one "
    "rank each; set parallel=fsdp2 or optim=adamw",
    "optim=muon parallel=fsdp2 memory.optimizer_offload=true": "memory.optimizer_offload=true is not an option of "
    "optim=muon, whose update needs full matrices on the device; set memory.optimizer_offload=false or optim=adamw",
    "optim=muon parallel=fsdp2 memory.cpu_offload=true": "memory.cpu_offload=true is not an option of optim=muon, "
    "whose update needs full matrices on the device; set memory.cpu_offload=false or optim=adamw",
    "optim.state_dtype=bfloat16 optim.beta2=0.999": "optim.beta2=0.999 shrinks a moment by less than "
    "optim.state_dtype=bfloat16 resolves, so that it would never fall; set optim.beta2=0.95 or "
    "optim.state_dtype=float32",
    "optim.state_dtype=bfloat16 memory.optimizer_offload=true": "optim.state_dtype=bfloat16 is of states that stay "
    "where they are, which memory.optimizer_offload=true moves; set memory.offload_state_dtype=bfloat16 and "
    "optim.state_dtype=float32",
    "optim.state_dtype=bfloat16 parallel=fsdp2 memory.cpu_offload=true memory.cpu_offload_executor=overlapped": "optim."
    "state_dtype=bfloat16 is not an option of memory.cpu_offload_executor=overlapped; set "
    "memory.cpu_offload_executor=native or optim.state_dtype=float32",
    "optim.state_dtype=int8 parallel=fsdp1": "optim.state_dtype=int8 keeps a scale for each part of a row of a matrix, "
    "which parallel=fsdp1 cuts elsewhere than between rows; set parallel=fsdp2 or optim.state_dtype=bfloat16",
    "optim.state_dtype=int4 parallel=toy_zero3": "optim.state_dtype=int4 keeps a scale for each part of a row of a "
    "matrix, which parallel=toy_zero3 keeps on one rank each; set parallel=fsdp2 or optim.state_dtype=bfloat16",
    "optim.state_dtype=int8 memory.optimizer_offload=true": "optim.state_dtype=int8 is of states that stay where they "
    "are, which memory.optimizer_offload=true moves; set memory.offload_state_dtype=bfloat16 and "
    "optim.state_dtype=float32",
    "optim.state_dtype=float8 optim.implementation=foreach": "optim.implementation=foreach is not an option of optim."
    "state_dtype=float8; set optim.implementation=fused, which compiles the update, or optim.implementation=for_loop",
    "optim.state_dtype=int8 optim.implementation=fused train.deterministic=true": "optim.implementation=fused compiles "
    "updates for each size with optim.state_dtype=int8, and rounds by it, which train.deterministic=true rules out; "
    "set optim.implementation=auto",
    "memory.optimizer_in_backward=true parallel=ddp": "memory.optimizer_in_backward=true frees gradients as they come, "
    "and parallel=ddp keeps all of them in its buckets; set parallel=fsdp2 or memory.optimizer_in_backward=false",
    "memory.optimizer_in_backward=true parallel=fsdp1": "memory.optimizer_in_backward=true frees gradients as they "
    "come, and parallel=fsdp1 gives them to the optimizer after the whole backward; set parallel=fsdp2 or "
    "memory.optimizer_in_backward=false",
    "memory.optimizer_in_backward=true parallel=fsdp2 mesh.fsdp_size=1": "memory.optimizer_in_backward=true saves "
    "nothing with mesh.fsdp_size=1, since FSDP2 holds gradients that go to replicas until the backward ends; set "
    "mesh.fsdp_size=-1 or memory.optimizer_in_backward=false",
    "memory.optimizer_in_backward=true parallel=fsdp2 optim=muon": "memory.optimizer_in_backward=true updates "
    "parameter by parameter, and optim=muon exchanges several at a time; set optim=adamw or "
    "memory.optimizer_in_backward=false",
    "memory.optimizer_in_backward=true parallel=fsdp2 memory.cpu_offload=true": "memory.optimizer_in_backward=true "
    "updates on the device in the backward, memory.cpu_offload=true elsewhere or later; set memory.cpu_offload=false "
    "or memory.optimizer_in_backward=false",
    "memory.optimizer_in_backward=true parallel=fsdp2 train.grad_accum=2": "memory.optimizer_in_backward=true leaves "
    "no gradients to add to, as train.grad_accum=2 needs; set train.grad_accum=1 or memory.optimizer_in_backward=false",
    "memory.optimizer_in_backward=true parallel=fsdp2": "memory.optimizer_in_backward=true updates before the norm of "
    "all gradients is known, by which train.max_grad_norm=1.0 scales them; set train.max_grad_norm=null or "
    "memory.optimizer_in_backward=false",
    "memory.optimizer_in_backward=true parallel=fsdp2 train.max_grad_norm=null": "memory.optimizer_in_backward=true "
    "updates before it is known whether all gradients are finite, for which train.skip_nonfinite=true waits; set "
    "train.skip_nonfinite=false or memory.optimizer_in_backward=false",
    "memory.optimizer_in_backward=true parallel=fsdp2 parallel.param_dtype=float16": "memory.optimizer_in_backward="
    "true updates before it is known whether a gradient of parallel.param_dtype=float16 overflowed, which skips the "
    "step; set memory.optimizer_in_backward=false or parallel.param_dtype=bfloat16",
    # Values that do not go together.
    "parallel.param_dtype=float16 train.skip_nonfinite=false": "train.skip_nonfinite=false would update with "
    "overflowed gradients, from which parallel.param_dtype=float16 finds its loss scale; set train.skip_nonfinite=true "
    "or parallel.param_dtype=bfloat16",
    "parallel=toy_zero3 parallel.param_dtype=float16": "parallel.param_dtype=float16 is not an option of "
    "parallel=toy_zero3, which computes with the tensors that it broadcasts; set parallel=fsdp2 or "
    "parallel.param_dtype=float32",
    "parallel.param_dtype=bfloat16 loss_scale.initial=1024": "loss_scale.initial=1024.0 does nothing with "
    "parallel.param_dtype=bfloat16; set parallel.param_dtype=float16 or leave it out",
    "parallel.param_dtype=float16 loss_scale.backoff_factor=1": "loss_scale.backoff_factor=1.0 must be above 0 and "
    "below 1; set loss_scale.backoff_factor=0.5",
    "parallel.param_dtype=float16 loss_scale.growth_factor=1": "loss_scale.growth_factor=1.0 must be above 1; set "
    "loss_scale.growth_factor=2.0",
    "data=bin data.files=[stream.bin] data.mask_documents=true": "data.mask_documents=true needs the id that ends a "
    "document, which data=bin does not know as set; set data.document_end=ID or data.mask_documents=false",
    "data=bin data.files=[stream.bin] data.document_end=300": "data.document_end=300 is no id below "
    "model.vocab_size=256; set data.document_end to the id that ends documents in the files, or to null",
    "data.mask_documents=true kernels.document_attention=flex": "kernels.document_attention=flex is PyTorch's "
    "flex_attention, which trains on CUDA alone and is not known to be deterministic, and this run is on cpu; set "
    "kernels.document_attention=auto",
    "model=qwen3_moe_debug model.top_k=9": "model.top_k=9 is more than model.n_experts=8; set model.top_k=8",
    "model=qwen3_moe_debug model.moe_every=3": "model.moe_every=3 leaves none of the model.n_layers=2 blocks with "
    "experts; set model.moe_every=1",
    "model=gpt2 train.seq_len=2048": "train.seq_len=2048 is over the model's model.max_seq_len=1024; "
    "set train.seq_len=1024",
    "train.seq_len=1024": "train.seq_len=1024 is over the model's model.max_seq_len=512; set train.seq_len=512",
    "memory.gradient_checkpointing=full memory.checkpointing_start_index=2": "memory.checkpointing_start_index=2 is "
    "past the last of the model's 2 layers; set memory.checkpointing_start_index=0 to checkpoint every block",
    "parallel=fsdp1 parallel.use_orig_params=false": "optim.weight_decay_on=matrices cannot select parameters "
    "under parallel.use_orig_params=false; set optim.weight_decay_on=all or parallel.use_orig_params=true",
    "parallel=ddp train.deterministic=true parallel.reduce_dtype=bfloat16": "parallel.reduce_dtype=bfloat16 "
    "contradicts train.deterministic=true, which reduces in float64; set parallel.reduce_dtype=auto",
    "train.deterministic=true train.sum_dtype=float32": "train.sum_dtype=float32 contradicts train.deterministic=true, "
    "whose norms and losses have the same bits on any layout, for which they are added up in float64; "
    "set train.sum_dtype=auto",
    "data.sample_tokens=5": "data.sample_tokens=5 is not an option of data=synthetic, it belongs to text; "
    "set data=text or leave it out",
    "data=text data.sample_tokens=-1": "data.sample_tokens=-1 must be at least 0; set data.sample_tokens=0",
    "data=text data.sample_prompt=''": "data.sample_prompt='' gives the model nothing to continue; "
    "set data.sample_prompt='def read(self, size=-1):'",
    "data=bin data.files=[missing.bin]": "data.files=[missing.bin] does not exist; set data.files to files that do, "
    f"as seen from {Path.cwd()}",
    "data=prepared data.weights=[a]": "data.weights=[a] must be a list of finite numbers; set data.weights=[]",
    "data=prepared data.weights=2": "data.weights=2 must be a list of finite numbers; set data.weights=[2]",
    "data=prepared data.folder=missing": "data.folder=missing is no folder with an index.json; make one with fsdptoys "
    "data prepare FILE ... --out missing --tokenizer T",
    "data=text data.files=[missing.txt]": "data.files=[missing.txt] does not exist; set data.files to files that do, "
    f"as seen from {Path.cwd()}",
    f"metrics.run_dir={__file__}/x": f"metrics.run_dir={__file__}/x needs a folder at {__file__}, "
    "which is not a folder; set metrics.run_dir=runs/NAME",
    "metrics=tensorbord": "metrics=tensorbord must be one of default, tensorboard, wandb; did you mean "
    "metrics=tensorboard?",
    "metrics.writers=wandb": "metrics.writers=wandb must be a list; set metrics.writers=[wandb]",
    "metrics.writers=[tensorbord]": "metrics.writers names tensorbord, which is none of tensorboard, wandb; "
    "set metrics.writers=[tensorboard,wandb] or fewer of them",
    "metrics.writers=[wandb,tensorboard,wandb]": "metrics.writers=[wandb,tensorboard,wandb] names one twice; "
    "set metrics.writers=[wandb,tensorboard]",
    "metrics.wandb_project=llamas": "metrics.wandb_project=llamas does nothing as set; set metrics=wandb or leave it "
    "out",
    "metrics=tensorboard metrics.wandb_mode=offline": "metrics.wandb_mode=offline does nothing as set; "
    "set metrics=wandb or leave it out",
    "metrics=wandb metrics.wandb_entity=''": "metrics.wandb_entity='' must not be empty; leave it out",
    "metrics=wandb metrics.wandb_mode=ofline": "metrics.wandb_mode=ofline must be one of online, offline, disabled or "
    "null; did you mean metrics.wandb_mode=offline?",
    # Not supported by the ranks or the device.
    "plan.world_size=0": "plan.world_size=0 must be at least 1; set plan.world_size=1",
    "plan.rows=0": "plan.rows=0 must be at least 1; set plan.rows=1",
    "plan.memory_gib=0": "plan.memory_gib=0.0 must be above 0; set plan.memory_gib=null",
    "mesh.fsdp_size=nod": "mesh.fsdp_size=nod must be a number of ranks, node for those of a node, hybrid for at "
    "least two copies, or -1 for all ranks; set mesh.fsdp_size=node",
    "mesh.fsdp_size=1.5": "mesh.fsdp_size=1.5 must be an integer or a word; set mesh.fsdp_size=-1",
    "mesh.fsdp_size=3": "mesh.fsdp_size=3 must divide the world size 2; set mesh.fsdp_size=2 or "
    "launch.nproc_per_node=3",
    "parallel=single": "parallel=single runs one process, the world size is 2; set parallel=ddp or "
    "launch.nproc_per_node=1",
    "parallel=ddp mesh.fsdp_size=2": "mesh.fsdp_size=2 shards parameters, which parallel=ddp does not; "
    "set parallel=fsdp2 or mesh.fsdp_size=-1",
    "parallel=fsdp1 memory.cpu_offload=true": "memory.cpu_offload=true needs an accelerator to offload from under "
    "parallel=fsdp1; set parallel=fsdp2 or memory.cpu_offload=false",
    "parallel=fsdp1 mesh.fsdp_size=1": "mesh.fsdp_size=1 makes FSDP1 keep full parameters and skip the all-reduce "
    "over replicas; set parallel=ddp, or parallel=fsdp2 to keep the mesh",
    "parallel=fsdp1 parallel.forward_prefetch=2": "parallel.forward_prefetch=2 is deeper than FSDP1 can prefetch; "
    "set parallel.forward_prefetch=1 or parallel=fsdp2",
    "parallel.param_dtype=float64": "parallel.param_dtype=float64 must be one of float32, bfloat16, float16; "
    "did you mean parallel.param_dtype=float16?",
    "parallel=fsdp2 optim=sgd optim.implementation=fused": "optim.implementation=fused has no SGD for FSDP2's sharded "
    "parameters; set optim.implementation=foreach",
    "parallel=ddp optim=sgd train.deterministic=true optim.implementation=fused": "optim.implementation=fused has SGD "
    "round by a shard's size on a CPU, which train.deterministic=true rules out; set optim.implementation=auto",
    "optim.eps=0": "optim.eps=0.0 must be above 0; set optim.eps=1e-08",
    "train.seed=18446744073709551616": "train.seed=18446744073709551616 must be at most 9223372036854775807; set "
    "train.seed to that or less",
    "launch.timeout_seconds=1e30": "launch.timeout_seconds=1e+30 must be at most 2592000; set launch.timeout_seconds "
    "to that or less",
    "model.rope_theta=0": "model.rope_theta=0.0 must be above 0; set model.rope_theta=10000.0",
    "model.init_std=-1": "model.init_std=-1.0 must be above 0; set model.init_std=0.02",
    "model.rope_scaling.high_freq_factor=0.5": "model.rope_scaling.high_freq_factor=0.5 must be at least "
    "model.rope_scaling.low_freq_factor=1.0; set model.rope_scaling.high_freq_factor=4.0",
    "train.label_smoothing=1": "train.label_smoothing=1.0 must be at least 0 and below 1; set "
    "train.label_smoothing=0.0",
    "train.z_loss_coef=-1": "train.z_loss_coef=-1.0 must be at least 0; set train.z_loss_coef=0.0",
    "patches=3": "patches=3 must be a word or a list of words; set patches=auto",
    # Switches of memory.
    "memory.chunk_loss=true memory.chunk_tokens=many": "memory.chunk_tokens=many must be auto or a number of tokens "
    "from 1 to 999999999; set memory.chunk_tokens=auto",
    "memory.chunk_loss=true memory.chunk_tokens=0": "memory.chunk_tokens=0 must be auto or a number of tokens from 1 "
    "to 999999999; set memory.chunk_tokens=auto",
    "memory.chunk_tokens=512": "memory.chunk_tokens=512 does nothing as set; set memory.chunk_loss=true or leave it "
    "out",
    "memory.chunk_grad_dtype=bfloat16": "memory.chunk_grad_dtype=bfloat16 does nothing as set; "
    "set memory.chunk_loss=true or leave it out",
    "memory.checkpointing_start_index=1": "memory.checkpointing_start_index=1 does nothing as set; "
    "set memory.gradient_checkpointing=full or leave it out",
    "memory.gradient_checkpointing=full memory.checkpointing_every=0": "memory.checkpointing_every=0 must be at least "
    "1; set memory.checkpointing_every=1",
    "memory.gradient_checkpointing=full memory.checkpointing_save=[mm]": "memory.checkpointing_save=[mm] does nothing "
    "as set; set memory.gradient_checkpointing=selective or leave it out",
    "memory.gradient_checkpointing=selective memory.checkpointing_save=[mul]": "memory.checkpointing_save names mul, "
    f"which is none of {', '.join(SAVED_OPERATORS)}; set memory.checkpointing_save=[{','.join(SAVED_OPERATORS)}]",
    "train.compile=true memory.checkpointing_budget=2": "memory.checkpointing_budget=2.0 must be between 0 and 1; set "
    "memory.checkpointing_budget=null",
    "parallel=fsdp1 parallel.use_orig_params=false optim.weight_decay_on=all train.compile=true": "train.compile=true "
    "passes over every module whose parameters FSDP1 made flat; set parallel.use_orig_params=true",
    "memory.checkpointing_budget=0.5": "memory.checkpointing_budget=0.5 acts through the compiler; "
    "set train.compile=true",
    "train.compile=true memory.checkpointing_budget=0.5 memory.gradient_checkpointing=full": "memory."
    "checkpointing_budget=0.5 lets the compiler choose recomputations, which "
    "memory.gradient_checkpointing=full does already; set memory.gradient_checkpointing=none",
    "memory.activation_offload=true": "memory.activation_offload=true moves saved tensors of checkpointed blocks, and "
    "none is checkpointed; set memory.gradient_checkpointing=full",
    "memory.offload_fraction=0.5": "memory.offload_fraction=0.5 does nothing as set; set memory.optimizer_offload=true "
    "or leave it out",
    "memory.optimizer_offload=true memory.offload_fraction=1.5": "memory.offload_fraction=1.5 must be between 0 and "
    "1; set memory.offload_fraction=1.0",
    "memory.optimizer_offload=true memory.offload_bucket_mib=0": "memory.offload_bucket_mib=0 must be at least 1; "
    "set memory.offload_bucket_mib=1",
    "parallel=fsdp1 memory.optimizer_offload=true memory.offload_schedule=lazy": "memory.offload_schedule=lazy is not "
    "an option of parallel=fsdp1; set memory.offload_schedule=pipelined or parallel=fsdp2",
    "train.compile=true memory.gradient_checkpointing=selective parallel.wrap=block_attn_mlp": "memory."
    "gradient_checkpointing=selective cannot see into blocks compiled by train.compile=true with experts, "
    "units within a block, memory.activation_offload=true, or mesh.cp_size or mesh.tp_size above 1; set "
    "memory.gradient_checkpointing=full",
    "memory.optimizer_offload=true optim=sgd optim.momentum=0": "memory.optimizer_offload=true moves states, of which "
    "optim=sgd keeps none as set; leave it out or set optim.momentum=0.9",
    "memory.optimizer_offload=true memory.offload_fraction=0": "memory.offload_fraction=0.0 moves nothing; "
    "set memory.optimizer_offload=false or memory.offload_fraction=1",
    "train.deterministic=true memory.optimizer_offload=true memory.offload_state_dtype=bfloat16": "memory."
    "offload_state_dtype=bfloat16 draws random numbers on each rank, which train.deterministic=true rules out; "
    "set memory.offload_state_dtype=float32",
    "memory.gradient_checkpointing=full memory.activation_offload=true": "memory.activation_offload=true saves nothing "
    "with fewer than 3 checkpointed blocks, of which there are 2; set memory.activation_offload=false",
    "memory.cpu_offload=true memory.cpu_threads=100000": "memory.cpu_threads=100000 is over the "
    f"{available_cores()} cores of this node; set memory.cpu_threads={available_cores()}",
    "profile.enabled=true profile.ranks=[a]": "profile.ranks=[a] must be a list of integers; set profile.ranks=[0]",
    "profile.enabled=true profile.ranks=all": "profile.ranks=all must be a list of integers; set profile.ranks=[0]",
    "patches=none": "patches=none must be auto or a list of names; set patches=auto, or patches=[] for none",
    "memory.cpu_offload=true memory.cpu_threads=0": "memory.cpu_threads=0 must be at least 1; set memory.cpu_threads=1",
    "memory.cpu_offload_executor=overlapped": "memory.cpu_offload_executor=overlapped does nothing as set; "
    "set memory.cpu_offload=true or leave it out",
    "kernels.attention=compiled": "kernels.attention=compiled must be one of auto, torch, cudnn, flash, efficient, "
    "math, flex, npu; set kernels.attention=auto",
    "kernels.rms_norm=npu": "kernels.rms_norm=npu is torch_npu's, and this run is on cpu; set kernels.rms_norm=auto",
    "kernels.swiglu=compiled debug.trace_collectives=true": "debug.trace_collectives=true is a dispatch mode, under "
    "which PyTorch does not compile as kernels.*=compiled asks; set them to torch, which takes the same collectives",
    "checkpoint.resume=auto": "checkpoint.resume=auto looks for checkpoints in the run directory, which is a new one "
    "each time; set metrics.run_dir=runs/NAME",
    "checkpoint.resume=must": "checkpoint.resume=must looks for checkpoints in the run directory, which is a new one "
    "each time; set metrics.run_dir=runs/NAME",
    "checkpoint.resume=''": "checkpoint.resume='' must not be empty; leave it out",
    "checkpoint.folder=''": "checkpoint.folder='' must not be empty; leave it out",
    "checkpoint.every=-1": "checkpoint.every=-1 must be at least 0; set checkpoint.every=0",
    "checkpoint.every=1e2": "checkpoint.every=1e2 must be an integer; set checkpoint.every=100",
    "checkpoint.timeout_seconds=0": "checkpoint.timeout_seconds=0.0 must be above 0; set "
    "checkpoint.timeout_seconds=7200.0",
    "checkpoint.keep=0": "checkpoint.keep=0 must be at least 1; set checkpoint.keep=1",
    "checkpoint.keep_every=100": "checkpoint.keep_every=100 keeps some of the checkpoints of checkpoint.every, which "
    "is 0; set checkpoint.every=100",
    "checkpoint.every=30 checkpoint.keep_every=100": "checkpoint.keep_every=100 must be a multiple of "
    "checkpoint.every=30; set checkpoint.keep_every=90",
    "checkpoint.form=ful": "checkpoint.form=ful must be one of sharded, full; did you mean checkpoint.form=full?",
    "checkpoint.async=true": "checkpoint.async=true names a key that does not exist; did you mean "
    "checkpoint.async_save=true?",
    "checkpoint.on_signal=maybe": "checkpoint.on_signal=maybe must be true or false; set checkpoint.on_signal=true or "
    "checkpoint.on_signal=false",
    "resume=auto": "resume=auto names a key that does not exist; did you mean checkpoint.resume=auto?",
    "launch.max_restarts=-1": "launch.max_restarts=-1 must be at least 0; set launch.max_restarts=0",
    "launch.max_restarts=3": "launch.max_restarts=3 would start from step 1 each time without checkpoints; set "
    "checkpoint.every=100",
    "launch.restarts=3": "launch.restarts=3 names a key that does not exist; did you mean launch.max_restarts=3?",
    "train.max_skipped=0": "train.max_skipped=0 must be at least 1; set train.max_skipped=1",
    "train.max_skipped_in_a_row=0": "train.max_skipped_in_a_row=0 must be at least 1; set train.max_skipped_in_a_row=1",
    "train.skip_nonfinite=null": "train.skip_nonfinite=null must be true or false; set train.skip_nonfinite=true or "
    "train.skip_nonfinite=false",
}


def compose_and_validate(words: list[str]) -> None:
    config = compose_config(words)
    check_run_dir(config.metrics)
    config.validate(world_size=2, device_type="cpu")


@pytest.fixture
def with_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checks find torchao under any torch; no check imports it."""
    monkeypatch.setattr(optimizer_checks, "torchao_fault", lambda: None)


@pytest.mark.usefixtures("with_torchao")
@pytest.mark.parametrize("typed", CONFLICTS)
def test_conflicts_are_reported_in_one_sentence(typed: str) -> None:
    """Oracle: the exact message."""
    if "parallel=fsdp2 mesh.fsdp_size=1" in typed and TORCH < (2, 8):
        pytest.skip("FSDP2 replicates on a CPU from torch 2.8 on")
    with pytest.raises(ConfigError) as caught:
        compose_and_validate(typed.split(" "))
    assert str(caught.value) == CONFLICTS[typed]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_deterministic_mode_refuses_fused_sgd_on_the_cpu(device_type: str) -> None:
    """Oracle: CPU offload steps on the CPU on every device; without it fused is valid on CUDA."""
    words = ["optim=sgd", "train.deterministic=true", "optim.implementation=fused"]
    offload = (
        ["parallel=fsdp1", "mesh.fsdp_size=-1", "memory.cpu_offload=true"]
        if device_type == "cuda"
        else ["parallel=ddp"]
    )
    with pytest.raises(ConfigError, match="round by a shard's size on a CPU"):
        compose_config([*words, *offload]).validate(2, device_type)
    if device_type == "cuda":
        compose_config([*words, "parallel=ddp"]).validate(2, device_type)


def test_more_shards_than_rows_are_refused() -> None:
    """Oracle: the expected message; 64 is the width of the debug model, and 48 the largest divisor of 96 below it."""
    with pytest.raises(ConfigError) as caught:
        compose_config([]).validate(96, "cuda")
    assert str(caught.value) == (
        "mesh.fsdp_size=-1 cuts parameters of 64 rows (model.dim) into 96 shards, so that ranks would hold nothing of "
        "them; set mesh.fsdp_size=48"
    )
    compose_config(["parallel=fsdp1"]).validate(96, "cuda")


@pytest.mark.usefixtures("with_torchao")
def test_shards_that_split_a_block_of_low_bit_states_are_refused() -> None:
    """Oracle: the message; 1,024 ranks divide neither 128 experts nor their 1,536 rows, but their 2,048 columns."""
    words = ["model=qwen3_moe_30b_a3b", "optim.state_dtype=int8"]
    with pytest.raises(ConfigError) as caught:
        compose_config(words).validate(1024, "cuda")
    assert str(caught.value) == (
        "optim.state_dtype=int8 keeps a scale for 256 numbers of a row, and mesh.fsdp_size=-1 cuts rows of "
        "layers.0.mlp.experts.gate_up_proj into 2; set a mesh.fsdp_size that divides 128 or optim.state_dtype=bfloat16"
    )
    compose_config([*words, "mesh.fsdp_size=128"]).validate(1024, "cuda")


@pytest.mark.parametrize(
    ("installed", "fault"),
    [
        (False, "is not installed; run pip install 'fsdptoys[torchao]'"),
        (True, f"cannot be imported with torch {torch.__version__}; install torch 2.11 or newer"),
    ],
    ids=["not installed", "torch too old"],
)
def test_low_bit_states_without_torchao_are_refused(
    installed: bool, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the expected message; torch 2.7 lacks the name that torchao imports."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
    monkeypatch.delattr(torch.nn.functional, "ScalingType", raising=False)
    with pytest.raises(ConfigError) as caught:
        compose_and_validate(["optim.state_dtype=int4"])
    assert str(caught.value) == (
        f"optim.state_dtype=int4 needs the package torchao, which {fault}, or set optim.state_dtype=bfloat16"
    )
