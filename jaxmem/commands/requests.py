"""Arguments of `jaxmem eval`; nothing heavy is imported."""

import argparse
import json
from collections.abc import Callable
from typing import Any


def add_eval(
    commands: Any, command: Callable, dtypes: tuple[str, ...], count: Callable
) -> None:
    """Add `jaxmem eval`."""
    evaluate = commands.add_parser(
        "eval",
        help="evaluate a run, a checkpoint or an adapter on benchmarks, by lm-eval",
        description="Evaluate a model on tasks of lm-evaluation-harness, and write "
        "eval.json: beside a run's metrics, where report.html shows it, or to --out.",
    )
    evaluate.add_argument(
        "model", metavar="DIR", help="run, checkpoint, adapter or Hub model"
    )
    evaluate.add_argument(
        "--tasks", required=True, metavar="NAME,…", help="tasks, by lm-eval's names"
    )
    evaluate.add_argument(
        "--include", metavar="FOLDER", help="folder of YAML files of your own tasks"
    )
    evaluate.add_argument(
        "--chat", action="store_true", help="ask as in a conversation"
    )
    for flag, options in {
        "--shots": {
            "type": int,
            "help": "examples in each prompt; the task's own number",
        },
        "--limit": {"type": count, "help": "documents of each task; all of them"},
        "--max-tokens": {
            "type": count,
            "help": "tokens and padding of a micro-batch; 4096",
        },
        "--batch-size": {"type": count, "help": "completions at once; 8"},
        "--adapter": {"help": "LoRA adapter in PEFT's layout, or Hub model of one"},
        "--dtype": {"choices": dtypes, "help": "the checkpoint's by default"},
        "--base": BASE,
        "--out": {
            "metavar": "FILE.json",
            "help": "file for the results; eval.json of the run",
        },
        **CODE,
    }.items():
        evaluate.add_argument(flag, default=argparse.SUPPRESS, **options)
    evaluate.set_defaults(command=command)


DTYPES = ("bfloat16", "float16", "float32")


def add_generate(commands: Any, command: Callable) -> None:
    """Add `jaxmem generate`."""
    generate = commands.add_parser(
        "generate",
        help="complete prompts with a run, a checkpoint or an adapter",
        description="Complete one prompt, a file of prompts, or a conversation.  After "
        "a kill, the same command with --in goes on.",
    )
    generate.add_argument(
        "model", metavar="DIR", help="run, checkpoint, adapter or Hub model"
    )
    generate.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="text to complete"
    )
    generate.add_argument("--chat", action="store_true", help="talk in the terminal")
    for flag, options in {
        "--system": {"help": "first message of a conversation"},
        "--in": {
            "dest": "source",
            "metavar": "FILE.jsonl",
            "help": 'file of prompts, lines of {"prompt": text or messages}',
        },
        "--out": {"metavar": "FILE.jsonl", "help": "file for the completions of --in"},
        "--adapter": {"help": "LoRA adapter in PEFT's layout, or Hub model of one"},
        "--dtype": {"choices": DTYPES, "help": "the checkpoint's by default"},
        "--base": BASE,
        "--chat-template-kwargs": TEMPLATE_KWARGS,
        "--reward": {
            "metavar": "NAME",
            "help": "reward of each completion of --in: math, ..., or FILE.py:NAME",
        },
        "--keep-best": {
            "action": "store_true",
            "help": "keep one completion of a prompt, of the highest reward",
        },
        "--min-reward": {
            "type": float,
            "metavar": "R",
            "help": "keep completions with a reward of at least R",
        },
        **CODE,
    }.items():
        generate.add_argument(flag, **options)
    for flag, options in {
        "--max-new-tokens": {
            "type": int,
            "help": "most tokens of a completion; what fits, up to 256",
        },
        "--temperature": {
            "type": float,
            "help": "divides the logits; 0: the most probable token",
        },
        "--top-k": {"type": int, "help": "sample among the k most probable tokens"},
        "--top-p": {
            "type": float,
            "help": "sample among the fewest of this probability",
        },
        "--min-p": {"type": float, "help": "drop tokens below this share of the best"},
        "--stop": {"action": "append", "help": "text that ends a completion"},
        "--seed": {"type": int, "help": "same seed, same completions; 0"},
        "--samples": {"type": int, "help": "completions of a prompt of --in; 1"},
        "--batch-size": {"type": int, "help": "completions at once, with --in; 8"},
    }.items():
        generate.add_argument(flag, default=argparse.SUPPRESS, **options)
    generate.set_defaults(command=command)


def add_export(commands: Any, command: Callable) -> None:
    """Add `jaxmem export`."""
    export = commands.add_parser(
        "export",
        help="save a run's model for transformers, adapters merged or not",
        description="Save the model of a run, or of its newest checkpoint if the run "
        "has not ended, as a directory that transformers (or PEFT) loads.",
    )
    export.add_argument(
        "path", metavar="DIR", help="run, checkpoint, adapter or Hub model"
    )
    export.add_argument("--out", help="directory to create; needed without --push")
    export.add_argument("--push", metavar="OWNER/NAME", help="upload it to the Hub")
    export.add_argument(
        "--private", action="store_true", help="with --push, make it private"
    )
    export.add_argument(
        "--merge",
        action="store_true",
        help="merge the adapters into the weights",
    )
    export.add_argument(
        "--base",
        metavar="OWNER/NAME",
        help="base that the saved adapter names: of the Hub, or a directory",
    )
    export.add_argument("--dtype", choices=DTYPES, help="type of the saved weights")
    for flag, options in CODE.items():
        export.add_argument(flag, **options)
    export.set_defaults(command=command)


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


BASE: dict[str, Any] = {
    "choices": ("nf4", "int8"),
    "help": "code the matrices of blocks in 4 or 8 bits as they are read",
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
        help="write log-probabilities and entropies of texts under a model",
        description="Scores every token of the texts, or of the responses, under a "
        "local checkpoint (config.json, safetensors, tokenizer.json).  Run the same "
        "command again to go on after a kill.",
    )
    score.add_argument(
        "model", metavar="MODEL_DIR", help="run, checkpoint, adapter or Hub model"
    )
    score.add_argument(
        "data",
        metavar="DATA.jsonl",
        help="records as supervised training reads them; or .json, .parquet, .txt",
    )
    for flag, options in {
        "--out": {"help": ".jsonl or .parquet; scores.jsonl by default"},
        "--max-tokens": {
            "type": int,
            "help": "tokens and padding of a micro-batch; 4096",
        },
        "--stride": {"type": int, "help": "score longer documents in windows"},
        "--dtype": {"choices": dtypes, "help": "the checkpoint's by default"},
        "--base": BASE,
        "--chunk": {"type": chunk, "help": "tokens with logits at once, or auto"},
        "--adapter": {"help": "LoRA adapter in PEFT's layout, or Hub model of one"},
        "--top-k": {"type": int, "help": "record a teacher's most likely ids, too"},
        "--sample-ids": {"type": int, "help": "record ids drawn from a teacher, too"},
        "--temperature": {"type": float, "help": "divides the logits of these ids; 1"},
        "--seed": {"type": int, "help": "selects the ids that are drawn; 0"},
        "--chat-template-kwargs": TEMPLATE_KWARGS,
        "--stripped": {
            "choices": ("raise", "mask", "count"),
            "help": "what to do with turns that the template cuts; raise",
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
