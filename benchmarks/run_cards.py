"""Rows of named models on one card: tokens/s, MFU and GiB, beside peers.

    python -m benchmarks.run_cards --list
    python -m benchmarks.run_cards --model qwen3-8b --training lora --seconds 540
    python -m benchmarks.run_cards --case 1 --case 2 --trace "none, 4 rows"
    python -m benchmarks.run_cards --model qwen3-8b --training lora --lengths chat \
        --variant "mine: full data.batch_size=8" --variant "theirs: torch compiled"

A case is a model, how it is trained, lengths of documents, and a variant of `run_step`,
which measures it in a process of its own. Cases stand in the order of their value, as
time may run out. The model has the dimensions of that name and random weights, which
differ between sides, as does the first loss: log V and what the initial weights add.

- `lora`: adapters of rank 16 on all seven matrices of a block, of a mixture of experts
  on attention's four; the rest is frozen in bfloat16. `whole`: all weights.
- `full`: rows of one document of 4,096 random ids. `chat`: documents of random ids, as
  long as the conversations in `chat_lengths.txt`, in packed rows of 4,096 tokens.
- tokens/s are those that the loss predicts: no padding, no last token of a document.
- MFU is by the formula of `jaxmem.train.mfu` on both sides: with adapters, products of
  frozen matrices count 4 FLOPs per weight and token, those of adapters 6; attention
  counts all tokens of a row, though a document sees its own. Recomputation is free.
- GiB are the allocator's peak. `clock_mhz` is read just after the steps.

Peers are transformers with PEFT under torch.compile, each layer compiled, which is what
accelerate calls regional compilation, and cross-entropy compiled with its product.
"""

import argparse
import dataclasses
import inspect
import os
import pathlib
import subprocess
import tempfile
import time
from collections.abc import Iterator

from benchmarks import results, run_step, workers

ROOT = pathlib.Path(__file__).parent.parent
COMMON = pathlib.Path(__file__).parent / "cards.gin"
KEYS = ("model", "training", "lengths", "variant", "overrides", "device")
SEVEN = "('query','key','value','output','gate','up','down')"
FOUR = "('query','key','value','output')"
ADAPTERS = (
    "model.lora_rank=16", "model.lora_alpha=32.0", "optimizer.trainable='lora_'",
)  # fmt: skip
CLOCKS = "clocks.sm,clocks.max.sm,power.limit,driver_version"


@dataclasses.dataclass(frozen=True)
class Model:
    """Dimensions, by the name of a file in configs/, and what differs from it."""

    config: str
    lines: tuple[str, ...] = ()
    targets: str = SEVEN


MODELS = {
    "qwen3-8b": Model("qwen3_8b"),
    "qwen3-0.6b": Model("qwen3_0_6b"),
    "llama-3.1-8b": Model("llama3_1_8b"),
    "qwen3-4b": Model("qwen3_4b"),
    "gemma-3-4b": Model("gemma3_4b"),
    "qwen3-30b-a3b": Model("qwen3_30b_a3b", targets=FOUR),
    # cuDNN's attention has no sinks.
    "gpt-oss-20b": Model("gpt_oss_20b", ("model.attention='xla'",), FOUR),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of the table."""

    model: str
    training: str  # "lora" or "whole"
    lengths: str  # "full" or "chat"
    name: str
    side: str  # "jax" or "torch"
    words: tuple[str, ...]  # as a `run_step.Variant` has them

    def variant(self, folder: pathlib.Path) -> run_step.Variant:
        """The variant for `run_step`; its config is written into the folder."""
        model = MODELS[self.model]
        path = folder / f"{self.model} {self.training}.gin"
        dimensions = ROOT / "configs" / f"model_{model.config}.gin"
        lines = [f'include "{file}"' for file in (dimensions, COMMON)]
        lines += model.lines
        if self.training == "lora":
            lines += [*ADAPTERS, f"model.lora_targets={model.targets}"]
        path.write_text("\n".join(lines) + "\n", "utf-8")
        return run_step.Variant(
            self.name, self.side, self.words, None, str(path), self.lengths
        )

    def columns(self) -> dict[str, str]:
        """The columns that identify its row."""
        names = "model", "training", "lengths"
        same = {name: getattr(self, name) for name in names}
        words = " ".join(self.words)
        return {**same, "variant": self.name, "side": self.side, "words": words}


def _cases(model, training, lengths, *lines) -> Iterator[Case]:
    """Cases of lines as "NAME: [torch] POLICY …"."""
    for line in lines:
        name, _, text = line.partition(":")
        words = text.split()
        side = "torch" if words[0] == "torch" else "jax"
        words = tuple(words[side == "torch" :])
        yield Case(model, training, lengths, name.strip(), side, words)


SAMPLED, UNROLLED = run_step.SAMPLED, run_step.UNROLLED
ADAFACTOR = "optimizer.name=adafactor"
SHORT = "data.batch_size=1 data.sequence_length=2048"
CASES = [
    *_cases(
        "qwen3-8b", "lora", "full",
        "none, 4 rows: none",
        "torch compiled, 4 rows: torch compiled_float32",
        f"none, no loop, 4 rows: none {UNROLLED}",
        f"none, no loop, sampled, 4 rows: none {UNROLLED} {SAMPLED}",
        "torch compiled, bf16 adapters, 4 rows: torch compiled",
    ),
    *_cases(
        "qwen3-8b", "lora", "chat",
        "none, 4 rows: none",
        "torch varlen, 4 rows: torch compiled_float32_varlen",
        f"none, no loop, 4 rows: none {UNROLLED}",
    ),
    *_cases(
        "qwen3-8b", "lora", "full",
        "none, 2 rows: none data.batch_size=2",
        "none, 6 rows: none data.batch_size=6",
        "full, 4 rows: full",
        "torch checkpointed, 8 rows: torch checkpoint_compiled_float32 "
        "data.batch_size=8",
        "torch compiled, 2 rows: torch compiled_float32 data.batch_size=2",
    ),
    *_cases(
        "qwen3-8b", "whole", "full",
        f"none, adafactor, 2 rows: none {ADAFACTOR} data.batch_size=2",
        f"none, no loop, adafactor, 3 rows: none {UNROLLED} {ADAFACTOR} "
        "data.batch_size=3",
        f"none, no loop, adafactor, 4 rows: none {UNROLLED} {ADAFACTOR}",
        f"save_attention, adafactor, 4 rows: save_attention {ADAFACTOR}",
        f"full, adafactor, 4 rows: full {ADAFACTOR}",
        "torch compiled, bf16 AdamW, 2 rows: torch compiled data.batch_size=2",
        "torch compiled, bf16 AdamW, 4 rows: torch compiled",
        f"torch compiled, adafactor, 2 rows: torch compiled_float32 {ADAFACTOR} "
        "data.batch_size=2",
        f"torch checkpointed, adafactor, 4 rows: torch checkpoint_compiled_float32 "
        f"{ADAFACTOR}",
    ),
    *_cases(
        "qwen3-0.6b", "lora", "full",
        "none, 8 rows: none data.batch_size=8",
        "torch compiled, 8 rows: torch compiled_float32 data.batch_size=8",
        f"none, no loop, 8 rows: none {UNROLLED} data.batch_size=8",
        f"none, no loop, sampled, 8 rows: none {UNROLLED} {SAMPLED} data.batch_size=8",
        f"none, sampled, 8 rows: none {SAMPLED} data.batch_size=8",
    ),
    *_cases(
        "qwen3-0.6b", "lora", "chat",
        "none, 8 rows: none data.batch_size=8",
        "torch varlen, 8 rows: torch compiled_float32_varlen data.batch_size=8",
    ),
    *_cases(
        "qwen3-8b", "lora", "full",
        "fit, 4 rows: fit remat.memory_limit=auto",
    ),
    *_cases(
        "qwen3-8b", "lora", "chat",
        "torch flex, 4 rows: torch compiled_float32_flex",
        "torch compiled, 4 rows: torch compiled_float32",
    ),
    *_cases(
        "llama-3.1-8b", "lora", "full",
        "none, 4 rows: none",
        "torch compiled, 4 rows: torch compiled_float32",
    ),
    *_cases(
        "qwen3-4b", "lora", "full",
        "none, 4 rows: none",
        "torch compiled, 4 rows: torch compiled_float32",
    ),
    *_cases(
        "gemma-3-4b", "lora", "full",
        "none, 4 rows: none",
        "torch compiled, 4 rows: torch compiled_float32",
    ),
    *_cases(
        "qwen3-30b-a3b", "lora", "full",
        "save_attention, 4 rows: save_attention",
        "torch checkpointed, 4 rows: torch checkpoint_float32",
    ),
    *_cases("gpt-oss-20b", "lora", "full", "none, 2 rows: none data.batch_size=2"),
    *_cases(
        "qwen3-0.6b", "whole", "full",
        "none, 8 rows: none data.batch_size=8",
        "torch compiled, 8 rows: torch compiled_float32 data.batch_size=8",
    ),
    *_cases(
        "qwen3-4b", "whole", "full",
        "full, 4 rows: full",
        "torch checkpointed, 4 rows: torch checkpoint_compiled_float32",
    ),
    *_cases(
        "llama-3.1-8b", "whole", "full", f"full, adafactor, 4 rows: full {ADAFACTOR}"
    ),
    *_cases("gemma-3-4b", "whole", "full", "full, 4 rows: full"),
    *_cases(
        "qwen3-8b", "whole", "full",
        "full, AdamW's moments on the host, 4 rows: full optimizer.offload=True",
    ),
    *_cases(
        "qwen3-8b", "lora", "full",
        "nf4, none, 4 rows: none model.base=nf4",
        "int8, none, 4 rows: none model.base=int8",
        "nf4, full, 4 rows: full model.base=nf4",
        f"nf4, full, 1 row of 2048: full model.base=nf4 {SHORT}",
    ),
]  # fmt: skip


def chosen_cases(args: argparse.Namespace) -> list[Case]:
    """Cases of --variant, or of the list those that the other options leave."""
    if args.variant:
        if not (args.model and args.training):
            raise SystemExit("--variant needs --model and --training")
        return [
            *_cases(args.model, args.training, args.lengths or "full", *args.variant)
        ]
    cases = [CASES[number - 1] for number in args.case] if args.case else CASES
    found = [
        each for each in cases
        if args.model in (None, each.model)
        and args.training in (None, each.training)
        and args.lengths in (None, each.lengths)
        and args.side in (None, each.side)
        and (not args.only or any(part in each.name for part in args.only))
    ]  # fmt: skip
    if not found:
        raise SystemExit("no case is left; --list prints them")
    return found


def clocks() -> dict[str, str]:
    """Columns of the visible GPU's clocks, power limit and driver; none without one."""
    try:
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
        command = [
            "nvidia-smi",
            f"--id={gpu}",
            f"--query-gpu={CLOCKS}",
            "--format=csv,noheader,nounits",
        ]
        text = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    names = "clock_mhz", "highest_clock_mhz", "power_limit_w", "driver"
    values = [value.strip() for value in text.splitlines()[0].split(",")]
    return dict(zip(names, values, strict=True))


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    parser.add_argument("--list", action="store_true", help="print cases and numbers")
    parser.add_argument("--case", action="append", type=int, help="a number of --list")
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--training", choices=["lora", "whole"])
    parser.add_argument("--lengths", choices=["full", "chat"])
    parser.add_argument("--side", choices=["jax", "torch"])
    parser.add_argument("--only", action="append", help="part of a variant's name")
    parser.add_argument(
        "--variant", action="append", default=[], help="NAME: [torch] POLICY …"
    )
    parser.add_argument("--trace", action="append", default=[], help="a variant's name")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--least", type=float, default=30.0, help="to start one more")
    parser.add_argument("--out", default="cards_h200.csv", help="in benchmarks/results")
    args = parser.parse_args(arguments)
    if args.list:
        for number, case in enumerate(CASES, start=1):
            print(number, case.model, case.training, case.lengths, case.name, sep=" | ")
        return
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        workers.compilation_cache() as environment,
    ):
        cases = {
            each.variant(pathlib.Path(folder)): each for each in chosen_cases(args)
        }
        args.config = COMMON
        for variant, row in run_step.measure([*cases], args, environment):
            same = cases[variant].columns()
            same |= {"overrides": " ".join(args.overrides)}
            row = {**same, **row, **clocks()}
            shares = row.pop("shares", [])
            print(f"{time.monotonic() - began:.0f} s: {row}", flush=True)
            results.merge(args.out, [row], KEYS)
            run_step.save_shares(args.out, row, shares, KEYS)


if __name__ == "__main__":
    main()
