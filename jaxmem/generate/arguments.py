"""Arguments of `jaxmem generate` and `jaxmem export`; nothing heavy is imported."""

import argparse
from collections.abc import Callable
from typing import Any

from jaxmem.score.arguments import CODE, TEMPLATE_KWARGS

DTYPES = ("bfloat16", "float16", "float32")


def add_generate(commands: Any, command: Callable) -> None:
    """Add `jaxmem generate`."""
    generate = commands.add_parser(
        "generate",
        help="complete prompts with a run, a checkpoint or an adapter",
        description="Completes one prompt, a file of prompts, or a conversation.  The "
        "same command with --in goes on after a kill.",
    )
    generate.add_argument("model", metavar="DIR", help="run, checkpoint or adapter")
    generate.add_argument("prompt", nargs="?", metavar="PROMPT", help="a text")
    generate.add_argument("--chat", action="store_true", help="a conversation")
    for flag, options in {
        "--system": {"help": "first message of a conversation"},
        "--in": {
            "dest": "source",
            "metavar": "FILE.jsonl",
            "help": 'a line a prompt, {"prompt": text or messages}',
        },
        "--out": {"metavar": "FILE.jsonl", "help": "of --in, the completions"},
        "--adapter": {"help": "directory of a LoRA adapter, in PEFT's layout"},
        "--dtype": {"choices": DTYPES, "help": "the checkpoint's by default"},
        "--chat-template-kwargs": TEMPLATE_KWARGS,
        **CODE,
    }.items():
        generate.add_argument(flag, **options)
    for flag, options in {
        "--max-new-tokens": {"type": int, "help": "what fits, at most 256"},
        "--temperature": {"type": float, "help": "0: the most probable token; 1"},
        "--top-k": {"type": int, "help": "among the k most probable tokens"},
        "--top-p": {"type": float, "help": "among the fewest of this probability"},
        "--min-p": {"type": float, "help": "at least this share of the best's"},
        "--stop": {"action": "append", "help": "text that ends a completion"},
        "--seed": {"type": int, "help": "same seed, same completions; 0"},
        "--batch-size": {"type": int, "help": "prompts at once, with --in; 8"},
    }.items():
        generate.add_argument(flag, default=argparse.SUPPRESS, **options)
    generate.set_defaults(command=command)


def add_export(commands: Any, command: Callable) -> None:
    """Add `jaxmem export`."""
    export = commands.add_parser(
        "export",
        help="save a run's model for transformers, adapters merged or not",
        description="Saves the model of a run, of its newest checkpoint if it has not "
        "ended, as a directory that transformers (or PEFT) loads.",
    )
    export.add_argument("path", metavar="DIR", help="run, checkpoint or adapter")
    export.add_argument("--out", required=True, help="directory to create")
    export.add_argument("--merge", action="store_true", help="adapters into matrices")
    export.add_argument("--dtype", choices=DTYPES, help="of the saved weights")
    for flag, options in CODE.items():
        export.add_argument(flag, **options)
    export.set_defaults(command=command)
