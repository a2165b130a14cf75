"""``fsdptoys generate``: continue a prompt with a trained model.

fsdptoys generate runs/mine --prompt "def read(self"
fsdptoys generate DIR --prompt "Once upon a time" --tokens 100 --temperature 0
"""

import json
import time
from collections.abc import Callable, Sequence

import torch

from fsdptoys.data.chat_rows import BadRowError
from fsdptoys.data.chat_template import ChatTemplate
from fsdptoys.data.tokenizer import check_ids
from fsdptoys.errors import ConfigError
from fsdptoys.models.generate import Draw, generate
from fsdptoys.train.pretrained import TrainedModel, read_device
from fsdptoys.utils.text import print_status

from .commands import check_count, parse


def generate_command(argv: Sequence[str]) -> int:
    """Run the command; return the exit status: 1 if the model's logits were not finite."""
    options = parse("generate", argv)
    sources = options.arguments
    prompts = options.prompt
    check_count("generate", sources, 1, "one run or folder", "runs/NAME --prompt TEXT")
    if not prompts:
        raise ConfigError(
            f"there is no prompt to continue; write fsdptoys generate {sources[0]} --prompt TEXT"
        )
    for name in ("top_k", "top_p", "seed"):
        if options.temperature == 0 and getattr(options, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} {getattr(options, name)} is for sampling, and "
                "--temperature 0 takes the most likely token; leave out one of them"
            )
    top_p = 1.0 if options.top_p is None else options.top_p
    draw = Draw(options.temperature, options.top_k, top_p, options.seed or 0)
    if options.system is not None and not options.chat:
        raise ConfigError(
            f"--system {options.system!r:.40} is a message of a conversation; add --chat, or "
            "leave it out"
        )
    device, dtype = read_device(options.device, options.dtype)

    trained = TrainedModel(sources[0], say=print_status, adapter=options.adapter)
    context = trained.choose_context(options.context)
    tokenizer = trained.tokenizer(options.tokenizer)
    ends = trained.ends()
    closing = ""
    if options.chat:
        if tokenizer.encode_chat is None:
            raise ConfigError(
                "--chat needs text, and --tokenizer ids has none; name the folder of the model's "
                "tokenizer"
            )
        template = trained.chat_template(options.tokenizer)
        encoded, closing = _encode_messages(
            template, tokenizer.encode_chat, prompts, options.system
        )
        if len(end := tokenizer.encode_chat(closing)) == 1:
            ends |= set(end)
    else:
        encoded = [tokenizer.encode(prompt) for prompt in prompts]
    longest = trained.config.max_seq_len
    for prompt, ids in zip(prompts, encoded, strict=True):
        option = f"--prompt {prompt!r:.40}"
        if not ids:
            raise ConfigError(
                f"{option} encodes to no token, and the model needs one; write a longer prompt"
            )
        check_ids(ids, trained.config.vocab_size, option)
        if len(ids) > context:
            fix = (
                f"or write --context {min(len(ids), longest)}"
                if context < longest
                else "as model.max_seq_len allows"
            )
            raise ConfigError(
                f"{option} has {len(ids)} tokens, and the model sees {context}; shorten it, {fix}"
            )
    model = trained.load(device, dtype)

    count = 0
    broken = False
    results = []
    started = time.perf_counter()
    for prompt, ids in zip(prompts, encoded, strict=True):
        tokens_T = torch.tensor(ids, device=device.torch_device)
        new_ids = generate(model, tokens_T, options.tokens, context, draw, ends)[
            len(ids) :
        ].tolist()
        count += len(new_ids)
        broken |= len(new_ids) < options.tokens and not (
            new_ids and new_ids[-1] in ends
        )
        if options.chat:
            text = tokenizer.decode([token for token in new_ids if token not in ends])
            text = text.partition(closing)[0] if closing else text
        else:
            text = tokenizer.decode(ids + new_ids)
        results.append({"prompt": prompt, "text": text, "ids": new_ids})
        if not options.json:
            print(
                ("\n" if len(results) > 1 else "") + str(results[-1]["text"]),
                flush=True,
            )
    seconds = time.perf_counter() - started
    if options.json:
        print(json.dumps(results, indent=2))
    print_status(
        f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} a second, on {device.type} in "
        f"{options.dtype}"
    )
    if broken:
        print_status(
            "the model's logits were not finite; its training diverged, or another --dtype is "
            "needed"
        )
    return int(broken)


def _encode_messages(
    template: ChatTemplate,
    encode: Callable[[str], list[int]],
    prompts: Sequence[str],
    system: str | None,
) -> tuple[list[list[int]], str]:
    """Return the ids with which a model answers each message after the system's, and the text that
    closes an answer."""
    encoded = []
    closing = ""
    for prompt in prompts:
        try:
            text, closing = template.turn(prompt, system)
            if system is not None and template.turn(prompt)[0] == text:
                raise ConfigError(
                    f"--system {system!r:.40} is left out by the chat template; leave out --system"
                )
        except BadRowError as error:
            option = f"--prompt {prompt!r:.40}" + (
                "" if system is None else f" after --system {system!r:.40}"
            )
            fix = (
                "write another, or leave out --chat"
                if system is None
                else "leave out --system"
            )
            raise ConfigError(f"{option} {error}; {fix}") from error
        encoded.append(encode(text))
    return encoded, closing
