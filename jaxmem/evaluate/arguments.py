"""Arguments of `jaxmem eval`; nothing heavy is imported."""

import argparse
from collections.abc import Callable
from typing import Any

from jaxmem.score.arguments import CODE


def add_eval(
    commands: Any, command: Callable, dtypes: tuple[str, ...], count: Callable
) -> None:
    """Add `jaxmem eval`."""
    evaluate = commands.add_parser(
        "eval",
        help="benchmarks of a run, a checkpoint or an adapter, by lm-eval",
        description="Evaluates a model on tasks of lm-evaluation-harness, and writes "
        "eval.json: beside a run's metrics, where report.html shows it, or to --out.",
    )
    evaluate.add_argument("model", metavar="DIR", help="run, checkpoint or adapter")
    evaluate.add_argument(
        "--tasks", required=True, metavar="NAME,…", help="as lm-eval names them"
    )
    evaluate.add_argument(
        "--include", metavar="FOLDER", help="of the YAML files of tasks of your own"
    )
    evaluate.add_argument("--chat", action="store_true", help="as conversations")
    for flag, options in {
        "--shots": {"type": int, "help": "examples in each prompt; the task's own"},
        "--limit": {"type": count, "help": "documents of each task; all"},
        "--max-tokens": {"type": count, "help": "slots of a micro-batch; 4096"},
        "--batch-size": {"type": count, "help": "completions at once; 8"},
        "--adapter": {"help": "directory of a LoRA adapter, in PEFT's layout"},
        "--dtype": {"choices": dtypes, "help": "the checkpoint's by default"},
        "--out": {"metavar": "FILE.json", "help": "eval.json in the run by default"},
        **CODE,
    }.items():
        evaluate.add_argument(flag, default=argparse.SUPPRESS, **options)
    evaluate.set_defaults(command=command)
