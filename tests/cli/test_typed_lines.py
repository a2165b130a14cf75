"""Lines that a new user types, with the first answer: the suggested words, or the values that they set.

Composed and validated in this process for two ranks on a CPU; no rank is started.
"""

import re
import shlex

import pytest

from fsdptoys.cli.commands import parse
from fsdptoys.cli.main import main
from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError

DASHES = "is not an option, since settings have no dashes before them;"
UNKNOWN = "names a key that does not exist;"
COMPOSES = "composes:"
MEMORY = "must be one of checkpointing, cpu_offload, lean, none, optimizer_offload, smallest;"
MESH = "must be one of full, hsdp, node;"
PARALLEL = (
    "must be one of ddp, fsdp1, fsdp2, single, toy_cp, toy_ddp, toy_ep, toy_fsdp, toy_zero1, toy_zero2, toy_zero3;"
)

LINES = {
    # Classic flags.
    "--gradient_checkpointing": f"{DASHES} write memory.gradient_checkpointing=full",
    "--gradient-checkpointing=off": f"{DASHES} write memory.gradient_checkpointing=off",
    "--activation_checkpointing": f"{DASHES} write memory.gradient_checkpointing=full",
    "--chunk_loss": f"{DASHES} write memory.chunk_loss=true",
    "--cpu_offload": f"{DASHES} write memory.cpu_offload=true",
    "--optimizer_offload": f"{DASHES} write memory.optimizer_offload=true",
    "--optimizer_offload=no": f"{DASHES} write memory.optimizer_offload=false",
    "--profile": f"{DASHES} write profile.enabled=true",
    "--batch_size=4": f"{DASHES} write train.batch_size=4",
    "--batch_size 4": f"{DASHES} write train.batch_size=4",
    "--per_device_train_batch_size 4 train.steps=2": f"{DASHES} write train.batch_size=4",
    "--num_layers": f"{DASHES} write model.n_layers=32, for example",
    "--num_layers 4": f"{DASHES} write model.n_layers=4",
    "--lr 3e-4": f"{DASHES} write optim.lr=3e-4",
    "--model_name_or_path X": f"{DASHES} write model.init_from=X, a folder in Hugging Face format, with the model= "
    "that fsdptoys convert from-hf prints for it",
    "--model=gpt2_debug": f"{DASHES} write model=gpt2_debug",
    "--momentum=0.9": f"{DASHES} write optim=muon optim.momentum=0.9",
    "optim=sgd --momentum=0.5": f"{DASHES} write optim.momentum=0.5",
    "--fsdp2": f"{DASHES} write parallel=fsdp2",
    "--stepz=3": f"{DASHES} did you mean train.steps=3?",
    "--use_lora": f"{DASHES} write tune=lora",
    "--use_lora=false": f"{DASHES} write tune=full",
    "--lora_r=16": f"{DASHES} write tune=lora tune.rank=16",
    "--tensor_parallel_size 2": f"{DASHES} write mesh.tp_size=2",
    "--pp_size 2": f"{DASHES} write mesh.pp_size=2",
    "--context_parallel_size=2": f"{DASHES} write mesh.cp_size=2",
    "--ulysses-sequence-parallel-size 2": f"{DASHES} write mesh.cp_size=2 parallel.context=ulysses",
    "--resume": f"{DASHES} write checkpoint.resume=auto metrics.run_dir=runs/new",
    "--wandb": f"{DASHES} write metrics=wandb",
    "--sharding_strategy=FULL_SHARD": f"{DASHES} write parallel=fsdp2",
    "--sharding_strategy=HYBRID_SHARD": f"{DASHES} write mesh=node",
    "--sharding_strategy=NO_SHARD": f"{DASHES} write parallel=ddp",
    "--fsdp_sharding_strategy SHARD_GRAD_OP": f"{DASHES} write parallel=fsdp2 parallel.reshard_after_forward=never",
    "--fsdp 'full_shard auto_wrap'": f"{DASHES} write parallel=fsdp2",
    "--fsdp_version=1": f"{DASHES} write parallel=fsdp1",
    "--fsdp_use_orig_params=false": f"{DASHES} write parallel=fsdp1 parallel.use_orig_params=false "
    "optim.weight_decay_on=all",
    "--fsdp_state_dict_type=FULL_STATE_DICT": f"{DASHES} write checkpoint.form=full",
    "--fsdp_cpu_ram_efficient_loading=true": f"{DASHES} each rank reads only its shard, leave it out",
    "--zero_stage=3": f"{DASHES} write parallel=fsdp2",
    "--zero_stage=2": f"{DASHES} write parallel=fsdp2 parallel.reshard_after_forward=never",
    "--zero_stage=1": f"{DASHES} write parallel=toy_zero1",
    "--zero_stage=0": f"{DASHES} write parallel=ddp",
    "--deepspeed": f"{DASHES} DeepSpeed is not used, write parallel=fsdp2",
    "--deepspeed ds_config.json": f"{DASHES} DeepSpeed is not used, write parallel=fsdp2",
    "--use-distributed-optimizer": f"{DASHES} write parallel=toy_zero1",
    "--mixed_precision=bf16": f"{DASHES} write parallel.param_dtype=bfloat16",
    "--gradient_accumulation_steps=4": f"{DASHES} write train.grad_accum=4",
    "--lr=1e-4": f"{DASHES} write optim.lr=1e-4",
    "--adam_beta2 0.95": f"{DASHES} write optim.beta2=0.95",
    "--warmup_ratio=0.03": f"{DASHES} the warmup is counted in steps, write optim.warmup_steps=20",
    "--seq_length": f"{DASHES} write train.seq_len=512, for example",
    "--seq_length 128": f"{DASHES} write train.seq_len=128",
    "--num_train_epochs": f"{DASHES} the length of a run is counted in steps, write train.steps=1000",
    "--num_train_epochs=3": f"{DASHES} the length of a run is counted in steps, write train.steps=1000",
    "--save_total_limit=2": f"{DASHES} write checkpoint.keep=2",
    "--eval_strategy=steps": f"{DASHES} evaluation is chosen by its interval, write train.eval_every=100",
    "--reshard_after_forward=true": f"{DASHES} write parallel.reshard_after_forward=always",
    "--recompute-granularity=full": f"{DASHES} write memory.gradient_checkpointing=full",
    "--activation_checkpoint.mode=selective": f"{DASHES} write memory.gradient_checkpointing=selective",
    "--training.local_batch_size=4": f"{DASHES} write train.batch_size=4",
    "--parallelism.data_parallel_shard_degree=2": f"{DASHES} write mesh.fsdp_size=2",
    # Groups.
    "--memory=lean": f"{DASHES} write memory=lean",
    "model=llama_bytes --memory=max": f"{DASHES} write memory=smallest",
    "--lean": f"{DASHES} write memory=lean",
    "--hsdp": f"{DASHES} write mesh=hsdp",
    "--mesh 2": f"{DASHES} write mesh.fsdp_size=2",
    "memory": "has no value; write memory=lean",
    "model=llama_bytes memory=max": f"{MEMORY} write memory=smallest",
    "memory=true": f"{MEMORY} write memory=lean",
    "memory=off": f"{MEMORY} write memory=none",
    "memory=default": f"{MEMORY} write memory=none",
    "memory=full": f"{MEMORY} write memory=checkpointing",
    "memory=selective": f"{MEMORY} write memory.gradient_checkpointing=selective",
    "memory=leen": f"{MEMORY} did you mean memory=lean?",
    "memory=none,lean": "gives several values, a run takes one; write memory=none",
    "mesh=hybrid": f"{MESH} write mesh=hsdp",
    "mesh=2": f"{MESH} write mesh.fsdp_size=2",
    "mesh=default": f"{MESH} set mesh=full",
    "mesh=nodes": f"{MESH} did you mean mesh=node?",
    "parallel=hsdp": f"{PARALLEL} write mesh=hsdp",
    "parallel=fsdp": f"{PARALLEL} write parallel=fsdp2",
    "parallel=FSDP1": f"{PARALLEL} did you mean parallel=fsdp1?",
    "mesh = node": "has no value; write mesh=node without spaces",
    "memory=lean": f"{COMPOSES} memory.chunk_loss=true memory.gradient_checkpointing=full memory.cpu_offload=false",
    "memory=lean memory.chunk_loss=false": f"{COMPOSES} memory.chunk_loss=false memory.gradient_checkpointing=full",
    "memory.chunk_loss=false memory=lean": f"{COMPOSES} memory.chunk_loss=false memory.gradient_checkpointing=full",
    "memory=cpu_offload memory=lean": f"{COMPOSES} memory.chunk_loss=true memory.cpu_offload=false",
    "memory=cpu_offload": f"{COMPOSES} memory.cpu_offload=true",
    "memory=optimizer_offload": f"{COMPOSES} memory.optimizer_offload=true",
    "model=llama_bytes memory=smallest": f"{COMPOSES} memory.cpu_offload=true memory.activation_offload=true",
    "experiment=llama3_1b": f"{COMPOSES} memory.gradient_checkpointing=full",
    "experiment=llama3_1b memory=none": f"{COMPOSES} memory.gradient_checkpointing=none",
    "mesh=hsdp": f"{COMPOSES} mesh.fsdp_size=1",
    "mesh=node": f"{COMPOSES} mesh.fsdp_size=2",
    "mesh=hsdp mesh.fsdp_size=2": f"{COMPOSES} mesh.fsdp_size=2",
    "model=llama3_8b model=gpt2_debug": f"{COMPOSES} model.name=gpt2_debug",
    "parallel=ddp parallel=fsdp1": f"{COMPOSES} parallel.name=fsdp1",
    # Keys without their section, or from elsewhere.
    "profile=true": "sets a whole section, but keys are set one by one; set for example profile.enabled=true",
    "debug=on": "sets a whole section, but keys are set one by one; set for example debug.trace_collectives=true",
    "gradient_checkpointing=true": f"{UNKNOWN} did you mean memory.gradient_checkpointing=true?",
    "gradient_clipping=true": f"{UNKNOWN} write train.max_grad_norm=1.0",
    "gradient_clipping=false": f"{UNKNOWN} write train.max_grad_norm=null",
    "grad_clip=0.5": f"{UNKNOWN} write train.max_grad_norm=0.5",
    "dtype=float16": f"{UNKNOWN} write parallel.param_dtype=float16",
    "dtype=bf16": f"{UNKNOWN} write parallel.param_dtype=bfloat16",
    "bf16=true": f"{UNKNOWN} write parallel.param_dtype=bfloat16",
    "bf16=false": f"{UNKNOWN} write parallel.param_dtype=float32",
    "fp16=yes": f"{UNKNOWN} write parallel.param_dtype=float16",
    "precision=16-mixed": f"{UNKNOWN} write parallel.param_dtype=float16",
    "dataset=shakespeare": f"{UNKNOWN} data sets are not downloaded by name, write data=text data.files=[FILE]",
    "dataset=text": f"{UNKNOWN} write data=text",
    "train_file=x.txt": f"{UNKNOWN} write data=text data.files=[x.txt]",
    "fsdp_min_num_params=1000": f"{UNKNOWN} write parallel.min_params=1000",
    "--fsdp_min_num_params 1e6": f"{DASHES} write parallel.min_params=1e6",
    "fsdp_transformer_layer_cls_to_wrap=Block": f"{UNKNOWN} write parallel.wrap_classes=[Block]",
    "auto_wrap_policy=SIZE_BASED_WRAP": f"{UNKNOWN} write parallel.min_params=1e8",
    "auto_wrap_policy=transformer_based_wrap": f"{UNKNOWN} write parallel.wrap=block",
    "min_params=1e6": f"{UNKNOWN} did you mean parallel.min_params=1e6?",
    "wrap_classes=[Attention]": f"{UNKNOWN} did you mean parallel.wrap_classes=[Attention]?",
    "learning_rate=1e-4": f"{UNKNOWN} write optim.lr=1e-4",
    "lr=0.1": f"{UNKNOWN} did you mean optim.lr=0.1?",
    "epochs=3": f"{UNKNOWN} the length of a run is counted in steps, write train.steps=1000",
    "seed=1": f"{UNKNOWN} did you mean train.seed=1?",
    "output_dir=out": f"{UNKNOWN} write metrics.run_dir=out",
    "resume=true": f"{UNKNOWN} write checkpoint.resume=auto metrics.run_dir=runs/new",
    "resume=false": f"{UNKNOWN} write checkpoint.resume=never",
    "max_steps=20": f"{UNKNOWN} write train.steps=20",
    "world_size=4": f"{UNKNOWN} write launch.nproc_per_node=4, or plan.world_size=4 for fsdptoys plan",
    "nproc=2": f"{UNKNOWN} write launch.nproc_per_node=2",
    "device=gpu": f"{UNKNOWN} did you mean launch.device=cuda?",
    "cpu_ofload=yes": f"{UNKNOWN} did you mean memory.cpu_offload=true?",
    "optimizer=adam": f"{UNKNOWN} write optim=adamw",
    "strategy=fsdp": f"{UNKNOWN} write parallel=fsdp2",
    "model.num_layers=3": f"{UNKNOWN} write model.n_layers=3",
    "momentum=0.9": f"{UNKNOWN} did you mean optim=muon optim.momentum=0.9?",
    # Words without a value, with spaces or with several values.
    "chunk_loss": "has no value; write memory.chunk_loss=true",
    "steps = 3": "has no value; write train.steps=3 without spaces",
    "batch_size=1,2": "gives several values, a run takes one; write train.batch_size=1",
    # Booleans for other values.
    "memory.gradient_checkpointing=true": f"{COMPOSES} memory.gradient_checkpointing=full",
    "memory.gradient_checkpointing=on": f"{COMPOSES} memory.gradient_checkpointing=full",
    "memory.gradient_checkpointing=off": f"{COMPOSES} memory.gradient_checkpointing=none",
    "train.float8=true": "must be one of none, tensorwise, rowwise; set train.float8=tensorwise",
    "train.max_grad_norm=false": "must be a finite number or null; set train.max_grad_norm=null",
    "train.eval_every=true": "must be an integer; set train.eval_every=1",
    "checkpoint.resume=true": "must be text; set checkpoint.resume=auto metrics.run_dir=runs/new",
    # Correct words.
    "parallel=fsdp1 parallel.min_params=1e6": f"{COMPOSES} parallel.min_params=1000000.0",
    "parallel=fsdp2 parallel.min_params=20000": f"{COMPOSES} parallel.min_params=20000.0",
    "model=gpt2_debug train.steps=3": f"{COMPOSES} train.steps=3",
    "parallel=fsdp2 memory.cpu_offload=true": f"{COMPOSES} memory.cpu_offload=true",
    "parallel=ddp memory.chunk_loss=true": f"{COMPOSES} memory.chunk_loss=true",
}
"""Typed line → first answer without the typed word at its beginning."""


WITHOUT_COMMAND = {
    "--chunk_loss": f"{DASHES} write fsdptoys train memory.chunk_loss=true",
    "--batch_size 4 train.steps=3": f"{DASHES} write fsdptoys train train.batch_size=4",
    "--deepspeed": f"{DASHES} DeepSpeed is not used, write fsdptoys train parallel=fsdp2",
    "--hsdp": f"{DASHES} write fsdptoys train mesh=hsdp",
    "--use_lora": f"{DASHES} write fsdptoys train tune=lora",
    "--unheard-of": f"{DASHES} see fsdptoys train --help for all keys",
    "--cfg job": "is an option of fsdptoys train; write fsdptoys train --cfg job",
    "-m parallel=fsdp1,fsdp2": "is an option of fsdptoys train; write fsdptoys train -m parallel=fsdp1,fsdp2",
    "--json": "is an option of fsdptoys plan; write fsdptoys plan --json",
    "chunk_loss=true": "is not a command; write fsdptoys train memory.chunk_loss=true",
    "train.steps=3": "is not a command; write fsdptoys train train.steps=3",
    "memory=lean": "is not a command; write fsdptoys train memory=lean",
    "fsdp2": "is not a command; write fsdptoys train parallel=fsdp2",
    "trian": "is not a command; did you mean fsdptoys train?",
    "qwertz": "is not a command; write fsdptoys train",
}
"""Words after ``fsdptoys``, of which the first is no command → answer without the first."""


def answer(line: str) -> tuple[str, Config | None]:
    """Return the error of a line, or "" and its configuration."""
    try:
        config = compose_config(parse("train", shlex.split(line)).words)
        config.validate(world_size=2, device_type="cpu")
    except ConfigError as error:
        return str(error), None
    return "", config


@pytest.mark.parametrize("line", LINES)
def test_first_answer_to_a_typed_line(line: str) -> None:
    """Oracle: the table above."""
    expected = LINES[line]
    sentence, config = answer(line)
    if not expected.startswith(COMPOSES):
        assert sentence.partition(" ")[2] == expected and sentence.partition(" ")[0] in line.split()
        return
    assert config is not None, sentence
    for word in expected.removeprefix(COMPOSES).split():
        key, _, value = word.partition("=")
        section, _, name = key.partition(".")
        assert str(config.to_dict()[section][name]).lower() == value


@pytest.mark.parametrize("line", WITHOUT_COMMAND)
def test_first_answer_without_a_command(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the table above."""
    assert main(shlex.split(line)) == 2
    assert capsys.readouterr().err.strip() == f"fsdptoys: {line.split()[0]} {WITHOUT_COMMAND[line]}"


@pytest.mark.parametrize("line", [line for line in LINES if not LINES[line].startswith(COMPOSES)])
def test_answered_words_are_accepted_when_pasted(line: str) -> None:
    """Oracle: they compose and validate, except for files and devices that are missing here."""
    words = re.split(
        r", | without |, for example", re.split(r"(?:write|did you mean|set|for example) ", LINES[line])[-1]
    )
    pasted = words[0].rstrip("?")
    if pasted.endswith("leave it out") or "leave it out" in LINES[line]:
        return
    others = [word for word in line.split() if re.match(r"\w.*=.", word) and word != answer(line)[0].split()[0]]
    sentence, _ = answer(" ".join([*others, pasted]))
    missing = ("does not exist", "optim.state_dtype=int8 needs torchao", "is not installed")
    assert not sentence or any(text in sentence for text in missing), sentence
