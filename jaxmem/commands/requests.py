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
        help="evaluate a run, a checkpoint or an adapter on benchmarks of lm-eval",
        description="Evaluate a model on tasks of lm-evaluation-harness. The results "
        "go to --out, or to eval.json in the directory of a run, where "
        "report.html shows them.",
    )
    evaluate.add_argument(
        "model", metavar="DIR", help="run, checkpoint, adapter or Hub model"
    )
    evaluate.add_argument(
        "--tasks",
        required=True,
        metavar="NAME,…",
        help="names of lm-eval's tasks, separated by commas",
    )
    evaluate.add_argument(
        "--include", metavar="FOLDER", help="folder with YAML files of your own tasks"
    )
    evaluate.add_argument(
        "--chat", action="store_true", help="format each prompt with the chat template"
    )
    for flag, options in {
        "--shots": {
            "type": int,
            "help": "number of examples in each prompt (default: the task's number)",
        },
        "--limit": {
            "type": count,
            "help": "number of documents to read of each task (default: all)",
        },
        "--max-tokens": {
            "type": count,
            "help": "number of tokens in a micro-batch, with padding (default 4096)",
        },
        "--batch-size": {
            "type": count,
            "help": "number of completions to sample at a time (default 8)",
        },
        "--adapter": {
            "help": "LoRA adapter to add: directory in PEFT's format, or Hub model"
        },
        "--dtype": {
            "choices": dtypes,
            "help": "type of the weights (default: the checkpoint's)",
        },
        "--base": BASE,
        "--out": {
            "metavar": "FILE.json",
            "help": "file for the results (default: eval.json in the run's directory)",
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
        description="Complete one prompt, a file of prompts, or the turns of a "
        "conversation. If a command with --in is interrupted, run it "
        "again to continue.",
    )
    generate.add_argument(
        "model", metavar="DIR", help="run, checkpoint, adapter or Hub model"
    )
    generate.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="text to complete"
    )
    generate.add_argument(
        "--chat", action="store_true", help="start a conversation in the terminal"
    )
    for flag, options in {
        "--system": {
            "help": "with --chat, system message at the start of the conversation"
        },
        "--in": {
            "dest": "source",
            "metavar": "FILE.jsonl",
            "help": 'file of prompts, with lines of {"prompt": text or messages}',
        },
        "--out": {"metavar": "FILE.jsonl", "help": "file for the completions of --in"},
        "--adapter": {
            "help": "LoRA adapter to add: directory in PEFT's format, or Hub model"
        },
        "--dtype": {
            "choices": DTYPES,
            "help": "type of the weights (default: the checkpoint's)",
        },
        "--base": BASE,
        "--chat-template-kwargs": TEMPLATE_KWARGS,
        "--reward": {
            "metavar": "NAME",
            "help": "reward to compute for each completion of --in, such as math or "
            "FILE.py:NAME",
        },
        "--keep-best": {
            "action": "store_true",
            "help": "of each prompt, keep only the completion with the highest reward",
        },
        "--min-reward": {
            "type": float,
            "metavar": "R",
            "help": "keep only completions with a reward of at least R",
        },
        **CODE,
    }.items():
        generate.add_argument(flag, **options)
    for flag, options in {
        "--max-new-tokens": {
            "type": int,
            "help": "maximum number of tokens in a completion (default: the space that "
            "remains, at most 256)",
        },
        "--temperature": {
            "type": float,
            "help": "number that divides the logits; 0 takes the most probable token "
            "(default 1)",
        },
        "--top-k": {
            "type": int,
            "help": "sample only from the TOP_K most probable tokens",
        },
        "--top-p": {
            "type": float,
            "help": "sample only from the fewest tokens whose total probability "
            "reaches TOP_P",
        },
        "--min-p": {
            "type": float,
            "help": "drop tokens whose probability is below MIN_P times the highest",
        },
        "--stop": {
            "action": "append",
            "help": "text that ends a completion; may be repeated",
        },
        "--seed": {"type": int, "help": "seed of the random numbers (default 0)"},
        "--samples": {
            "type": int,
            "help": "number of completions for each prompt of --in (default 1)",
        },
        "--batch-size": {
            "type": int,
            "help": "with --in, number of completions to sample at a time (default 8)",
        },
    }.items():
        generate.add_argument(flag, default=argparse.SUPPRESS, **options)
    generate.set_defaults(command=command)


def add_serve(commands: Any, command: Callable, count: Callable) -> None:
    """Add `jaxmem serve`."""
    serve = commands.add_parser(
        "serve",
        help="serve a run, a checkpoint or an adapter over HTTP, by routes of vLLM",
        description="Answer requests for completions over HTTP, with jaxmem's own "
        "sampler and the routes of vLLM that trainers use. The address is printed as "
        "soon as requests are answered. SIGTERM and Ctrl-C end the server.",
    )
    serve.add_argument(
        "model", metavar="DIR", help="run, checkpoint, adapter or Hub model"
    )
    for flag, options in {
        "--host": {
            "help": "address to listen on (default 127.0.0.1: only this machine)"
        },
        "--port": {
            "type": int,
            "help": "port to listen on (default 8000); 0 takes a free one",
        },
        "--name": {"help": "name of the model in requests (default DIR)"},
        "--slots": {
            "type": count,
            "help": "number of completions to decode at a time (default 16)",
        },
        "--max-len": {
            "type": count,
            "help": "maximum number of tokens of a prompt and its completion (default: "
            "the model's, at most 2048)",
        },
        "--weights": {
            "action": "append",
            "metavar": "FOLDER",
            "help": "load new weights from directories below this folder when a "
            "request asks for it; may be repeated (default: load none)",
        },
        "--token": {
            "help": "token that requests must send as `Authorization: Bearer TOKEN` "
            "(default: $JAXMEM_ENGINE_TOKEN, or none)"
        },
        "--enable-return-routed-experts": {
            "action": "store_true",
            "help": "return the experts of each token, for trainers that replay them",
        },
        "--max-body": {
            "type": count,
            "metavar": "MIB",
            "help": "maximum size of a request (default 16)",
        },
        "--max-waiting": {
            "type": count,
            "metavar": "COMPLETIONS",
            "help": "maximum number of completions that wait for a slot (default 4096)",
        },
        "--max-logprobs": {
            "type": int,
            "metavar": "K",
            "help": "maximum number of most probable tokens that a request may ask for "
            "(default 256)",
        },
        "--adapter": {
            "help": "LoRA adapter to add: directory in PEFT's format, or Hub model"
        },
        "--dtype": {
            "choices": DTYPES,
            "help": "type of the weights (default: the checkpoint's)",
        },
        "--base": BASE,
        "--trust-code": CODE["--trust-code"],
    }.items():
        serve.add_argument(flag, default=argparse.SUPPRESS, **options)
    serve.set_defaults(command=command)


def add_export(commands: Any, command: Callable) -> None:
    """Add `jaxmem export`."""
    export = commands.add_parser(
        "export",
        help="save a run's model for transformers, with or without merged adapters",
        description="Save the model of a run, or of its newest checkpoint if the run "
        "has not ended, as a directory that transformers (or PEFT) loads.",
    )
    export.add_argument(
        "path", metavar="DIR", help="run, checkpoint, adapter or Hub model"
    )
    export.add_argument("--out", help="directory to create; required without --push")
    export.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="upload the model to this repository of the Hub",
    )
    export.add_argument(
        "--private",
        action="store_true",
        help="with --push, make a new repository private",
    )
    export.add_argument(
        "--merge",
        action="store_true",
        help="merge the adapters into the weights",
    )
    export.add_argument(
        "--base",
        metavar="OWNER/NAME",
        help="base model to record in the saved adapter: a Hub model or a directory",
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
    "help": "load the matrices of blocks as codes of 4 (nf4) or 8 (int8) bits",
}


CODE: dict[str, dict[str, Any]] = {
    "--factory": {
        "metavar": "FILE.py:NAME",
        "help": "your own code for the model of a run with model.factory",
    },
    "--trust-code": {
        "action": "store_true",
        "help": "allow the code that the run's settings name",
    },
}


def add_score(
    commands: Any, command: Callable, dtypes: tuple[str, ...], chunk: Callable
) -> None:
    """Add `jaxmem score`."""
    score = commands.add_parser(
        "score",
        help="write log-probabilities and entropies of texts under a model",
        description="Score every token of texts, or of the responses in "
        "conversations, under a model. If the command is interrupted, run "
        "it again to continue.",
    )
    score.add_argument(
        "model", metavar="MODEL_DIR", help="run, checkpoint, adapter or Hub model"
    )
    score.add_argument(
        "data",
        metavar="DATA.jsonl",
        help="file of records in the formats of supervised training: .jsonl, .json, "
        ".parquet or .txt",
    )
    for flag, options in {
        "--out": {
            "help": ".jsonl or .parquet file for the scores (default scores.jsonl)"
        },
        "--max-tokens": {
            "type": int,
            "help": "number of tokens in a micro-batch, with padding (default 4096)",
        },
        "--stride": {
            "type": int,
            "help": "score documents longer than --max-tokens in windows that "
            "advance by STRIDE tokens",
        },
        "--dtype": {
            "choices": dtypes,
            "help": "type of the weights (default: the checkpoint's)",
        },
        "--base": BASE,
        "--chunk": {
            "type": chunk,
            "help": "number of tokens whose logits exist at a time (default auto)",
        },
        "--adapter": {
            "help": "LoRA adapter to add: directory in PEFT's format, or Hub model"
        },
        "--top-k": {
            "type": int,
            "help": "also record the TOP_K most probable ids of each token, for "
            "distillation",
        },
        "--sample-ids": {
            "type": int,
            "help": "also record SAMPLE_IDS ids drawn for each token, for distillation",
        },
        "--temperature": {
            "type": float,
            "help": "with --top-k or --sample-ids, number that divides the logits "
            "(default 1)",
        },
        "--seed": {
            "type": int,
            "help": "with --sample-ids, seed of the draws (default 0)",
        },
        "--chat-template-kwargs": TEMPLATE_KWARGS,
        "--stripped": {
            "choices": ("raise", "mask", "count"),
            "help": "handling of a turn from which the template removes text: stop "
            "(raise), skip the turn (mask) or score the rest (count); default "
            "raise",
        },
        **CODE,
    }.items():
        score.add_argument(flag, default=argparse.SUPPRESS, **options)
    score.add_argument(
        "--all",
        dest="everything",
        action="store_true",
        help="score all tokens of conversations, not only those that the loss counts",
    )
    score.add_argument(
        "--eos",
        action="store_true",
        help="also score the token that ends each document",
    )
    score.set_defaults(command=command)
