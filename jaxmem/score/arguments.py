"""Arguments of `jaxmem score`; nothing heavy is imported."""

import argparse
import json
from collections.abc import Callable
from typing import Any


def json_object(text: str) -> dict[str, Any]:
    """An argument that is an object as JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


TEMPLATE_KWARGS: dict[str, Any] = {
    "type": json_object,
    "metavar": "JSON",
    "help": """variables of the chat template, as in '{"enable_thinking": false}'""",
}


CODE: dict[str, dict[str, Any]] = {
    "--factory": {
        "metavar": "FILE.py:NAME",
        "help": "of a run of model.factory: the code of its model",
    },
    "--trust-code": {
        "action": "store_true",
        "help": "run the code that the run itself names",
    },
}


def add_score(
    commands: Any, command: Callable, dtypes: tuple[str, ...], chunk: Callable
) -> None:
    """Add `jaxmem score`."""
    score = commands.add_parser(
        "score",
        help="log-probabilities and entropies of texts under a checkpoint",
        description="Scores every token of the texts, or of the responses, under a "
        "local checkpoint (config.json, safetensors, tokenizer.json).  Run the same "
        "command again to go on after a kill.",
    )
    score.add_argument(
        "model", metavar="MODEL_DIR", help="directory of a run, checkpoint or adapter"
    )
    score.add_argument(
        "data",
        metavar="DATA.jsonl",
        help="records as supervised training reads them; or .json, .parquet, .txt",
    )
    for flag, options in {
        "--out": {"help": ".jsonl or .parquet; scores.jsonl by default"},
        "--max-tokens": {"type": int, "help": "slots of a micro-batch; 4096"},
        "--stride": {"type": int, "help": "score longer documents in windows"},
        "--dtype": {"choices": dtypes, "help": "the checkpoint's by default"},
        "--chunk": {"type": chunk, "help": "tokens with logits at once, or auto"},
        "--adapter": {"help": "directory of a LoRA adapter, in PEFT's layout"},
        "--top-k": {"type": int, "help": "record a teacher's most likely ids, too"},
        "--sample-ids": {"type": int, "help": "record ids drawn from a teacher, too"},
        "--temperature": {"type": float, "help": "of what is recorded for them; 1"},
        "--seed": {"type": int, "help": "of --sample-ids; 0"},
        "--chat-template-kwargs": TEMPLATE_KWARGS,
        "--stripped": {
            "choices": ("raise", "mask", "count"),
            "help": "turns of which the template leaves out text; raise",
        },
        **CODE,
    }.items():
        score.add_argument(flag, default=argparse.SUPPRESS, **options)
    score.add_argument(
        "--all",
        dest="everything",
        action="store_true",
        help="of conversations, score all tokens, not those alone that the loss counts",
    )
    score.add_argument("--eos", action="store_true", help="score the end of each too")
    score.set_defaults(command=command)
