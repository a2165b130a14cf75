"""The commands that read weights: ``convert``, ``generate``, ``evaluate`` and ``checkpoint``."""

from .parser import AddCommand, Parser, integer, number

SOURCE = """
RUN_OR_DIR is the directory of a run with final weights (checkpoint.final_weights=true) or
checkpoints, a checkpoint's folder or URL, or a folder in Hugging Face format: config.json and
safetensors files. The model must fit one device.
"""


def _add_model_options(parser: Parser) -> None:
    """Add the options of commands that use a trained model."""
    parser.value(
        "--context N",
        "maximum context in tokens, at most model.max_seq_len; default: train.seq_len of the "
        "run, or the folder's own",
        "1024",
        type=integer(1),
    )
    parser.value(
        "--tokenizer T",
        "bytes, ids (the text is numbers separated by spaces), or a tokenizer.json or its "
        "folder; default: that of the folder or of the run's data",
        "bytes",
    )
    parser.value(
        "--adapter DIR",
        "folder in PEFT's format, whose low-rank adapters are added to the weights",
        "runs/NAME/adapter",
    )
    parser.value(
        "--device D", "cuda, npu or cpu; default: an accelerator if there is one", "cpu"
    )
    parser.value(
        "--dtype D",
        "dtype of the weights: float32 (default), bfloat16 or float16",
        "bfloat16",
        default="float32",
    )


def add_weights_commands(add: AddCommand) -> None:
    """Add ``convert``, ``generate`` and ``evaluate``."""
    add(
        "convert to-hf RUN OUT_DIR [dtype=float32|bfloat16|float16] [tokenizer=DIR] [adapter=DIR]",
        "write a run's weights in Hugging Face format",
        """\
Write the final weights of a run (checkpoint.final_weights=true) or those of a checkpoint in Hugging
Face format. RUN is the run's directory, its folder weights, or a checkpoint's folder or URL;
OUT_DIR must not exist. The files of a tokenizer, its chat template included, are copied from the
folder DIR. With adapter=DIR, a folder in PEFT's format, its low-rank adapters are added to the
weights, and RUN may be a folder in Hugging Face format.
""",
    )
    add(
        "convert from-hf DIR",
        "check such a folder, and print the command that trains from it",
        "Check every value of a folder in Hugging Face format, and print the command that "
        "trains from it.\n",
    )
    add(
        "convert from-dcp DCP_DIR OUT_DIR [model=PRESET [model.KEY=VALUE ...]] [dtype=float32|...]",
        "write a checkpoint of torchtitan in Hugging Face format",
        """\
Write the weights of a folder of torch.distributed.checkpoint, under torchtitan's names of Llama 3
or Qwen3, in Hugging Face format, and print the command that trains from it. The model is named
after the folders, or found among the presets by the shapes. Such a folder holds no settings:
compare the rotary base and its scaling with those of the run. dtype is float32, bfloat16 or
float16. No code in the folder's pickle is run.
""",
    )
    add(
        "convert to-dcp RUN_OR_DIR OUT_DIR [dtype=float32|bfloat16|float16] [names=0.2|0.5]",
        "write weights for torch.distributed.checkpoint, under torchtitan's names",
        """\
Write the weights of a run, a checkpoint or a folder in Hugging Face format into a folder that
torch.distributed.checkpoint.load reads, under the names that torchtitan 0.2 or 0.5 has for Llama 3
and Qwen3. OUT_DIR must not exist.
""",
    )

    generate = add(
        "generate RUN_OR_DIR --prompt TEXT [--prompt TEXT ...] [options]",
        "continue a prompt with a run's weights, or those of a folder in Hugging Face format",
        f"""\
Print each prompt and the model's continuation, and the speed to stderr. Text ends with the folder's
eos_token_id, if it has one.
{SOURCE}""",
    )
    generate.value(
        "--prompt TEXT",
        "text to continue; may be repeated",
        "TEXT, or --prompt=--x for one with dashes",
        action="append",
        default=[],
    )
    generate.any_text.add("--prompt")
    generate.flag(
        "--chat",
        "each prompt is a user's message, to which the chat template has the model answer",
    )
    generate.value(
        "--system TEXT",
        "with --chat: the system's message before each prompt",
        "'Answer briefly.'",
    )
    generate.any_text.add("--system")
    generate.value(
        "--tokens N",
        "tokens to add; default: 200",
        "200",
        type=integer(200),
        default=200,
    )
    generate.value(
        "--temperature X",
        "divides the logits; default: 1; 0 takes the most likely token",
        "0.8",
        default=1.0,
        type=number("number of at least 0", "1", lambda value: value >= 0),
    )
    generate.value(
        "--top-k N", "sample from the N most likely tokens", "50", type=integer(1)
    )
    generate.value(
        "--top-p X",
        "sample from the fewest most likely tokens with this total probability",
        "0.9",
        type=number("number above 0 and at most 1", "1", lambda value: 0 < value <= 1),
    )
    generate.value(
        "--seed N", "seed of each prompt's samples; default: 0", "1", type=integer(0, 0)
    )
    _add_model_options(generate)
    generate.flag("--json", "prompts, texts and added ids, as a list of objects")

    evaluate = add(
        "evaluate RUN [options]\nevaluate RUN_OR_DIR --text FILE [options]\n"
        "evaluate RUN_OR_DIR --tasks NAME,NAME [--tasks-dir DIR] [options]",
        "loss and perplexity of such a model on a text or on its run's held-out data, or scores "
        "on tasks",
        f"""\
Print the model's loss in nats per token, perplexity and bits per byte on its run's held-out data,
or on a text, in independent windows of --context tokens. With --tasks, print the scores of tasks of
lm-eval and write them to a file.
{SOURCE}""",
    )
    evaluate.value(
        "--text FILE",
        "text, of which all tokens but the first are predicted; default: held-out data",
    )
    evaluate.value(
        "--windows N",
        "use the first N held-out windows; default: all",
        "100",
        type=integer(1),
    )
    evaluate.value(
        "--batch N",
        "windows, or continuations of tasks, per batch; default: 1",
        "8",
        type=integer(1),
        default=1,
    )
    evaluate.value(
        "--tasks NAME,NAME", "tasks of lm-eval, or of --tasks-dir", "my_task"
    )
    evaluate.value(
        "--tasks-dir DIR",
        "folder with a file NAME.yaml for each task; files with !function are refused",
        "tasks",
    )
    evaluate.value(
        "--limit N", "use the first N samples of each task", "100", type=integer(1)
    )
    evaluate.value(
        "--few-shot N",
        "examples before each question; default: as the task says",
        "5",
        type=integer(0, 0),
    )
    evaluate.value(
        "--out FILE.json",
        "path of the tasks' results; default: tasks.json in RUN_OR_DIR",
    )
    evaluate.flag(
        "--allow-task-code",
        "run the code that task files name; only for files you trust",
    )
    evaluate.flag("--allow-downloads", "let tasks download their data sets and metrics")
    _add_model_options(evaluate)
    evaluate.flag("--json", "exact numbers, as an object")


def add_checkpoint_commands(add: AddCommand) -> None:
    """Add ``checkpoint ls`` and ``checkpoint show``."""
    ls = add(
        "checkpoint ls PATH [--verify] [--json]",
        "list the checkpoints of a run, and the one that checkpoint.resume=auto selects",
        """\
List checkpoints: step, state, time, layout, tensors, size, and whether the checksums hold. PATH is
a run directory, a folder or URL of checkpoints, or one of them. An incomplete one has no manifest:
it is being written, or was left by a kill. Checksums are compared if local checkpoints have at most
1 GiB together, or with --verify.

Exit status: 0, 1 if one is damaged, 2 after a mistake.
""",
    )
    ls.flag("--verify", "read all files and compare their checksums")
    ls.flag("--json", "exact numbers, as an object")
    contents = add(
        "checkpoint show PATH [PATTERN] [--json]",
        "show the contents of a checkpoint: layout, tensors, optimizer states, position in the "
        "data",
        """\
Show a checkpoint, or the newest complete one of a run or folder, and its parameters. PATTERN
selects other tensors by name: model.NAME is a parameter, optim.NAME.STATE a state of it; * stands
for any text, as in 'optim.*.exp_avg'.
""",
    )
    contents.flag(
        "--json", "exact numbers, and all facts besides tensors, as an object"
    )
