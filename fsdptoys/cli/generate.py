"""``fsdptoys generate``: continue a prompt with a trained model.

fsdptoys generate runs/mine --prompt "def read(self"
fsdptoys generate DIR --prompt "Once upon a time" --tokens 100 --temperature 0
"""

import json
import sys
import time
from collections.abc import Sequence

import torch

from fsdptoys.data.tokenizer import check_ids
from fsdptoys.errors import ConfigError
from fsdptoys.models.generate import Draw, generate
from fsdptoys.train.pretrained import OPTIONS, TrainedModel, read_device

from .help import read_integer, read_number, refuse_unknown, take_options, take_repeated

VALUES = {
    "--tokens": "200",
    "--temperature": "0.8",
    "--top-k": "50",
    "--top-p": "0.9",
    "--seed": "1",
    **OPTIONS,
}


def run_generate(words: Sequence[str]) -> int:
    """Run the command.

    Args:
        words: as typed after the command.

    Returns:
        Exit status: 1 if the model's logits were not finite.

    Raises:
        ConfigError: for the first mistake, before anything is allocated.
    """
    words, prompts = take_repeated(words, "--prompt", "TEXT")
    places, options = take_options(words, ["--json"], VALUES)
    refuse_unknown("generate", places, ["--prompt", "--json", *VALUES])
    if len(places) != 1:
        given = "none was given" if not places else f"{len(places)} were given"
        raise ConfigError(
            f"fsdptoys generate needs one run or folder, and {given}; write fsdptoys generate runs/NAME --prompt TEXT"
        )
    if not prompts:
        raise ConfigError(f"there is no prompt to go on from; write fsdptoys generate {places[0]} --prompt TEXT")
    draw = _read_draw(options)
    count = read_integer(options, "--tokens", 200, least=1)
    typed = read_integer(options, "--context", 0, least=1) or None
    device, dtype = read_device(options)

    trained = TrainedModel(places[0], say=_say)
    context = trained.choose_context(typed)
    tokenizer = trained.tokenizer(options.get("--tokenizer"))
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        _check_prompt(prompt, ids, context, trained)
    model = trained.load(device, dtype)

    ends, made, broken, told = trained.ends(), 0, False, []
    started = time.perf_counter()
    for prompt, ids in zip(prompts, encoded, strict=True):
        tokens_T = torch.tensor(ids, device=device.torch_device)
        written = generate(model, tokens_T, count, context, draw, ends)[len(ids) :].tolist()
        made += len(written)
        broken |= len(written) < count and not (written and written[-1] in ends)
        told.append({"prompt": prompt, "text": tokenizer.decode(ids + written), "ids": written})
        if "--json" not in options:
            print(("\n" if len(told) > 1 else "") + str(told[-1]["text"]), flush=True)
    seconds = time.perf_counter() - started
    if "--json" in options:
        print(json.dumps(told, indent=2))
    kind = options.get("--dtype", "float32")
    _say(f"{made} tokens in {seconds:.2f} s, {made / seconds:.1f} a second, on {device.type} in {kind}")
    if broken:
        _say("the model's logits were not finite; its training diverged, or another --dtype is needed")
    return int(broken)


def _read_draw(options: dict[str, str]) -> Draw:
    temperature = read_number(options, "--temperature", 1.0, least=0)
    top_k = read_integer(options, "--top-k", 0, least=1) or None
    top_p = read_number(options, "--top-p", 1.0, least=0, most=1, above=True)
    seed = read_integer(options, "--seed", 0, least=0)
    if temperature == 0:
        for option in ("--top-k", "--top-p", "--seed"):
            if option in options:
                raise ConfigError(
                    f"{option} {options[option]} is about draws, and --temperature 0 takes the likeliest token; leave "
                    "one of them out"
                )
    return Draw(temperature, top_k, top_p, seed)


def _check_prompt(prompt: str, ids: list[int], context: int, trained: TrainedModel) -> None:
    if not ids:
        raise ConfigError(
            f"--prompt {prompt!r:.40} is no token, and the model needs one to go on from; write a longer one"
        )
    check_ids(ids, trained.config.vocab_size, f"--prompt {prompt!r:.40}")
    if len(ids) > context:
        longest = trained.config.max_seq_len
        fix = f"or write --context {min(len(ids), longest)}" if context < longest else "as model.max_seq_len allows"
        raise ConfigError(
            f"--prompt {prompt!r:.40} has {len(ids)} tokens, and the model sees {context}; shorten it, {fix}"
        )


def _say(sentence: str) -> None:
    print(f"fsdptoys: {sentence}", file=sys.stderr, flush=True)
