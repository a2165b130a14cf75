"""Names that other training frameworks give to settings → the words that set the same here.

A name with the same values is an ``alias`` of its option; the table has the others, and those of
models. A name may be typed with dashes before it (``--learning_rate=1e-4``) or as a key
(``learning_rate=1e-4``); dashes and underscores within it are the same. ``NAME=VALUE`` is for that
value alone, where ``true`` stands for every spelling of it and for no value, ``false`` likewise,
and ``N`` for every number. Keys without their section (``chunk_loss``) need no entry.
"""

from collections.abc import Mapping

from fsdptoys.register import live_cache

_TABLE = {
    # Model; *: the typed value.
    "num_layers n_layer num_hidden_layers depth layers": "model.n_layers=*",
    "hidden_size d_model n_embd embed_dim hidden_dim emb_dim": "model.dim=*",
    "num_heads n_head num_attention_heads nhead": "model.n_heads=*",
    "num_key_value_heads num_kv_heads": "model.n_kv_heads=*",
    "intermediate_size ffn_hidden_size mlp_dim": "model.ffn_dim=*",
    "model_name arch architecture preset": "model=*",
    "model_name_or_path pretrained_model_name_or_path model_path base_model hf_model_path": (
        "model.init_from=*, a folder in Hugging Face format, with the model= that fsdptoys convert "
        "from-hf prints for it"
    ),
    "init_from=scratch": "model.init_from=null",
    "init_from=resume": "checkpoint.resume=auto metrics.run_dir=runs/new",
    "init_from=gpt2": (
        "the weights come from hf download openai-community/gpt2 --local-dir gpt2: model=gpt2 "
        "model.init_from=gpt2"
    ),
    "init_from=gpt2-medium": (
        "the weights come from hf download openai-community/gpt2-medium --local-dir gpt2-medium: "
        "model=gpt2_medium model.init_from=gpt2-medium"
    ),
    "init_from=gpt2-large": (
        "the weights come from hf download openai-community/gpt2-large --local-dir gpt2-large: "
        "model=gpt2_large model.init_from=gpt2-large"
    ),
    "init_from=gpt2-xl": (
        "the weights come from hf download openai-community/gpt2-xl --local-dir gpt2-xl: "
        "model=gpt2_xl model.init_from=gpt2-xl"
    ),
    "dropout attention_dropout": "models have no dropout: ",
    (
        "use_lora lora peft use_peft finetuning_type=lora tune=peft lora_r lora_rank lora_alpha "
        "lora_dropout"
    ): "tune=lora",
    "use_lora=false lora=false peft=false use_peft=false tune=none tune=false": "tune=full",
    "qlora load_in_4bit tune=qlora": "tune=lora tune.base=nf4",
    "load_in_8bit": "weights are quantized to four bits only: tune=lora tune.base=nf4",
    "lora_r=N lora_rank=N": "tune=lora tune.rank=*",
    "lora_alpha=N": "tune=lora tune.alpha=*",
    "lora_dropout=N": "tune=lora tune.dropout=*",
    "adapter_name_or_path lora_weights resume_from_adapter": "tune=lora tune.adapter=*",
    "use_dora dora": "of adapters only the plain form is supported: tune=lora",
    # Precision.
    "precision=16 precision=16-mixed fp16 float16 half": "parallel.param_dtype=float16",
    "bf16=true bfloat16=true mixed_precision=true amp=true precision=bf16-mixed": (
        "parallel.param_dtype=bfloat16"
    ),
    "bf16=false bfloat16=false fp16=false float16=false half=false amp=false": (
        "parallel.param_dtype=float32"
    ),
    # Strategy.
    "strategy parallelism parallel_strategy distributed_strategy data_parallel_type dp_type": (
        "parallel=*"
    ),
    "implementation=custom": "parallel=toy_fsdp",
    "implementation=pytorch": "parallel=ddp, fsdp1 and fsdp2 are PyTorch's: ",
    "fsdp use_fsdp sharding_strategy fsdp_sharding_strategy": "parallel=fsdp2",
    "fsdp=false use_fsdp=false use_ddp=true sharding_strategy=no_shard": "parallel=ddp",
    (
        "sharding_strategy=hybrid_shard fsdp_sharding_strategy=hybrid_shard fsdp=hybrid_shard "
        "hybrid_shard=true"
    ): "mesh=node",
    (
        "hsdp=true mesh=true mesh=hybrid mesh=hybrid_shard mesh=2d parallel=hsdp strategy=hsdp "
        "data_parallel_type=hsdp dp_type=hsdp"
    ): "mesh=hsdp",
    "hsdp=false hybrid_shard=false": "mesh=full",
    "mesh=N": "mesh.fsdp_size=*",
    (
        "sharding_strategy=shard_grad_op fsdp_sharding_strategy=shard_grad_op fsdp=shard_grad_op "
        "zero_stage=2 zero=2 parallel=zero2"
    ): "parallel=fsdp2 parallel.reshard_after_forward=never",
    "parallel=fsdp parallel=zero3 zero_stage=3 zero=3": "parallel=fsdp2",
    "zero_stage=true zero=true parallel=zero1": "parallel=toy_zero1",
    "zero_stage=false zero=false": "parallel=ddp",
    "fsdp_version=true": "parallel=fsdp1",
    "fsdp_version use_fsdp2": "parallel=fsdp2",
    "use_distributed_optimizer": "parallel=toy_zero1",
    "evenness_priority": (
        "parallel=toy_zero3 parallel.evenness=model, which balances the bytes of the whole model"
    ),
    "data_parallel_replicate_degree dp_replicate": (
        "the size of a copy gives their number: mesh=hsdp"
    ),
    "reshard_after_forward=true parallel.reshard_after_forward=true": (
        "parallel.reshard_after_forward=always"
    ),
    "fsdp_use_orig_params=false use_orig_params=false": (
        "parallel=fsdp1 parallel.use_orig_params=false optim.weight_decay_on=all"
    ),
    "fsdp_use_orig_params=true use_orig_params=true": (
        "parallel=fsdp1 parallel.use_orig_params=true"
    ),
    "fsdp_cpu_ram_efficient_loading fsdp_sync_module_states sync_module_states": (
        "each rank reads only its shard: "
    ),
    "limit_all_gathers": "all-gathers are limited already: ",
    "ddp_find_unused_parameters find_unused_parameters": (
        "every parameter takes part in each step: "
    ),
    "deepspeed zero zero_stage zero_optimization": "DeepSpeed is not used: parallel=fsdp2",
    "sequence_parallel": "tokens are split between layers wherever features are: mesh.tp_size=2",
    "ulysses_size ulysses_degree ulysses_sequence_parallel_size": (
        "mesh.cp_size=* parallel.context=ulysses"
    ),
    "ring_degree ring_attn_size ring_size": "mesh.cp_size=* parallel.context=ring",
    (
        "fsdp_transformer_layer_cls_to_wrap transformer_layer_cls_to_wrap transformer_layer_cls "
        "module_wrap_policy fsdp_module_classes"
    ): "parallel.wrap_classes=[*]",
    "auto_wrap_policy fsdp_auto_wrap_policy": (
        "units are whole blocks, or chosen by parallel.wrap_classes or parallel.min_params: "
        "parallel.wrap=block"
    ),
    "auto_wrap_policy=size_based_wrap fsdp_auto_wrap_policy=size_based_wrap": (
        "parallel.min_params=1e8"
    ),
    "auto_wrap_policy=transformer_based_wrap fsdp_auto_wrap_policy=transformer_based_wrap": (
        "parallel.wrap=block"
    ),
    "mesh.fsdp_size=false": "mesh.fsdp_size=1",
    # Memory.
    "memory=true low_memory=true": "memory=lean",
    "memory=max memory=min memory=minimal memory=all memory=everything": "memory=smallest",
    "memory=offload memory=cpu": "memory=cpu_offload",
    "memory=ac memory=recompute memory=gradient_checkpointing memory=full": "memory=checkpointing",
    "memory=selective": "memory.gradient_checkpointing=selective",
    "memory=default memory=off memory=false": "memory=none",
    # Loop.
    "global_batch_size total_batch_size": (
        "the batch is set per rank and micro-batch: train.batch_size=1"
    ),
    "epochs epoch num_epochs max_epochs num_train_epochs": (
        "the length of a run is counted in steps: train.steps=1000"
    ),
    "eval_strategy evaluation_strategy do_eval": (
        "evaluation is chosen by its interval: train.eval_every=100"
    ),
    "do_train": "fsdptoys train always trains: ",
    "flash_attention flash_attn use_flash_attn use_flash_attention attn_implementation": (
        "PyTorch chooses flash attention by itself: kernels.attention=auto"
    ),
    # Optimizer.
    "optimizer optimizer_type": "optim=*",
    "warmup_ratio": "the warmup is counted in steps: optim.warmup_steps=20",
    # Data.
    "dataset dataset_name": "data sets are not downloaded by name: data=text data.files=[FILE]",
    "dataset=text dataset=bin dataset=hf dataset=prepared dataset=synthetic": "data=*",
    "files train_file train_files data_path dataset_path data_dir": "data=text data.files=[*]",
    # Run directory and checkpoints.
    "config config_file config_name": "files of settings have an option: --config *",
    "run_name exp_name wandb_run_name": "metrics.run_dir=runs/*",
    "state_dict_type fsdp_state_dict_type": "checkpoint.form=sharded",
    "state_dict_type=full_state_dict fsdp_state_dict_type=full_state_dict": "checkpoint.form=full",
    "overwrite_output_dir": "a run never overwrites another: metrics.run_dir=runs/new",
    "checkpoint.resume=true resume=true resume_from_checkpoint=true": (
        "checkpoint.resume=auto metrics.run_dir=runs/new"
    ),
    "checkpoint.resume=false resume=false resume_from_checkpoint=false": "checkpoint.resume=never",
    "wandb=true use_wandb=true wandb_log=true": "metrics=wandb",
    "tensorboard=true use_tensorboard=true": "metrics=tensorboard",
    "report_to logger": "metrics=*",
    "wandb=false use_wandb=false wandb_log=false tensorboard=false report_to=none": (
        "metrics=default"
    ),
    # Processes.
    "world_size": "launch.nproc_per_node=*, or plan.world_size=* for fsdptoys plan",
    "master_addr main_process_ip": "launch.rdzv_endpoint=*:29400",
    "master_port main_process_port": "launch.rdzv_endpoint=HOST:*",
    "local_rank node_rank rank machine_rank": (
        "the launcher numbers the ranks: launch.nproc_per_node=-1"
    ),
    "backend dist_backend": "the backend follows from the device: launch.device=auto",
    "use_cpu=true cpu=true no_cuda=true": "launch.device=cpu",
}
"""Names, separated by spaces → words, after the reason and a colon if nothing does the same; no
words: to leave out."""


@live_cache
def familiar_names() -> Mapping[str, str]:
    """Return name → override: of the options' aliases, and of the table."""
    # imports torch, which help does without
    from .declared_options import (
        declared_options,
    )

    aliases = {
        alias: f"{key}=*"
        for key, option in declared_options().items()
        for alias in option.aliases
    }
    return aliases | {
        name: override for names, override in _TABLE.items() for name in names.split()
    }


def find_familiar(name: str, value: str) -> tuple[str, str] | None:
    """Return the override for a name with a value, and the reason if they do not mean the same.

    The reason is "" if they do.

    Args:
        name: in lower case, without dashes.
        value: ``true`` for every spelling of it and for no value, likewise ``false``; else as
            typed.
    """
    familiar = familiar_names()
    number = familiar.get(f"{name}=N") if value.isdigit() else None
    text = familiar.get(f"{name}={value.lower()}") or number or familiar.get(name, "")
    reason, _, override = text.rpartition(": ")
    return (override, reason) if text else None
