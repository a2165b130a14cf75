"""The commands ``data prepare``, ``data check`` and ``data show``."""

from .parser import AddCommand, Parser, integer, number


def _add_chat_options(parser: Parser) -> None:
    """Add how text or conversations are read, for ``data prepare`` and ``data show``."""
    parser.value("--tokenizer T", "bytes, or a tokenizer.json or its folder", "bytes")
    parser.value(
        "--document-end TOKEN",
        "token that ends each document; default: the tokenizer's; 0 for bytes",
    )
    parser.value(
        "--field NAME",
        "field of records and tables with the text; default: text, or messages with --chat",
        "body",
    )
    parser.flag(
        "--chat", "records are conversations, as for data=chat: only answers are labels"
    )
    parser.value(
        "--template T",
        "with --chat: chatml, or a Jinja file; default: the tokenizer's own",
        "chatml",
    )


def add_data_commands(add: AddCommand) -> None:
    """Add the commands with their options."""
    prepare = add(
        "data prepare FILE ... --out DIR --tokenizer T [options]",
        "tokenize text or conversations into a folder to train on",
        """\
Tokenize text in several processes into memory-mapped shards with an index and checksums;
data=prepared data.folder=DIR trains on them. DIR exists only when complete; after an interruption
the same command resumes. The result depends neither on that nor on --processes.

FILE is a path, a glob, or stdlib (the source of Python's standard library). Its extension gives the
format: .jsonl, .ndjson and .json have one object per line, .parquet and .arrow are tables, anything
else is one document of UTF-8 text; .gz and .zst are decompressed. A folder saved by datasets can be
read too. Tables, such folders and .zst need pip install -e '.[data]'.
""",
    )
    prepare.value("--out DIR", "folder to make; must not exist")
    _add_chat_options(prepare)
    prepare.flag(
        "--skip-bad-rows",
        "with --chat: leave out rows that are no conversation, instead of stopping",
    )
    prepare.value(
        "--eval-fraction X",
        "share of the documents to hold out, by a hash of their text; default: 0",
        "0.01",
        default=0.0,
        type=number(
            "number of at least 0 and below 1", "0.01", lambda value: 0 <= value < 1
        ),
    )
    prepare.value(
        "--processes N",
        "tokenizing processes; default: one per core",
        "2",
        type=integer(1),
    )
    prepare.value(
        "--shard-tokens N",
        f"a shard ends with the document that reaches this number; default: {2**27}",
        str(2**27),
        type=integer(2**27),
    )
    add(
        "data check DIR ...",
        "verify the checksums of such folders; status 1 if one is damaged",
    )
    show = add(
        "data show DIR ... [--json] | ROWS ... --chat --tokenizer T [--row N]",
        "print the index of folders, or a conversation with what is learned of it",
        """\
Without --chat, print documents, tokens, splits, tokenizer and sources of prepared folders. With
--chat, read conversations as data=chat does, and print one as the template writes it: the learned
tokens in color, or in brackets where there is none, their number, and what the template leaves out.
""",
    )
    show.flag("--json", "exact numbers, as a list of objects")
    _add_chat_options(show)
    show.value(
        "--row N",
        "with --chat: the conversation to print, from 1; default: 1",
        "1",
        type=integer(1),
    )
