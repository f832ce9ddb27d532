"""ms of a decode step, tokens/s of the prefill: jaxmem's sampler and transformers.

    python -m benchmarks.run_decode --trace temperature
    python -m benchmarks.run_decode --side jax --only temperature --trace temperature
    python -m benchmarks.run_decode --side torch
    python -m benchmarks.run_decode --config benchmarks/experts_step.gin --out x.csv

Random weights at Qwen3-8B's dimensions, or a config's, in bfloat16, 64 rows of random
prompts, 128 tokens after each. A variant is a way of sampling, a length of prompts and
a number of slots in the cache. Each side runs in a process of its own, and rows are
written as they come. Columns:

    step_ms            median of the steps' parts, each of `part` steps, without prefill
    read_gb            what a step must read: the weights, of experts those that even
                       choices are expected to have, and the slots filled halfway
    tb_per_s           the one by the other
    prefill_ms         prompts read, and a first token drawn
    prefill_over_gemm  operations per second of it, of the GEMM of `ff` in this process

A trace's summary, by class of kernel and by kernel, goes into a file of its own.
"""

import argparse
import inspect
import json
import pathlib
import time
from typing import Any, NamedTuple

from benchmarks import results, workers

CONFIG = pathlib.Path(__file__).parent.parent / "configs/grpo_qwen3_8b_h200.gin"
KEYS = ("path", "sampling", "rows", "prompt", "slots", "overrides", "device")
SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {},
    "greedy": {"temperature": 0},
    "top_k=50": {"top_k": 50},
    "top_p=0.95": {"top_p": 0.95},
}


class Variant(NamedTuple):
    """A case to measure; the cache has one slot a token of prompt and completion."""

    name: str
    sampling: str  # of SAMPLING
    prompt: int
    new: int  # tokens that there is room for; those after the first 128 are not drawn

    def columns(self, rows: int) -> dict[str, Any]:
        """The columns that tell its row apart."""
        slots = self.prompt + self.new
        return {"sampling": self.sampling, "rows": rows, "prompt": self.prompt,
                "slots": slots}  # fmt: skip


VARIANTS = [
    *(Variant(name, name, 128, 128) for name in SAMPLING),
    Variant("prompts of 512", "temperature", 512, 128),
    Variant("cache of 2048", "temperature", 128, 1920),
]


def jobs(args: argparse.Namespace) -> dict[str, dict]:
    """Jobs for the workers, by module."""
    variants = [
        each for each in VARIANTS
        if not args.only or any(part in each.name for part in args.only)
    ]  # fmt: skip
    if not variants:
        names = ", ".join(each.name for each in VARIANTS)
        raise SystemExit(f"no variant is left; there are: {names}")
    job = {
        "config": str(args.config),
        "overrides": args.overrides,
        "rows": args.rows,
        "part": args.part,
        "parts": args.parts,
        "trace": args.trace,
        "loop": args.loop,
        "options": dict(text.split("=", 1) for text in args.option),
        "until": time.time() + args.seconds,
    }
    made = {}
    for side in ("jax", "torch"):
        asked = [v for v in variants if side == "jax" or v.new == v.prompt]
        if asked and args.side in (None, side):
            scaled = [(*v[:2], *(n // args.shrink for n in v[2:])) for v in asked]
            made[f"benchmarks.decode_{side}"] = job | {"variants": scaled}
    return made


def save(out: str, row: dict, kernels: list[dict]) -> None:
    """One row, and those of its trace."""
    print(row, flush=True)
    results.merge(out, [row], KEYS)
    same = {key: row.get(key, "") for key in (*KEYS, "step_ms", "jax", "date")}
    rows = [{**same, **kernel} for kernel in kernels]
    for kernel in kernels:
        print("   ", *kernel.values())
    if rows:
        path = pathlib.Path(out)
        path = path.with_name(f"{path.stem}_trace.csv")
        results.merge(path, rows, (*KEYS, "class", "kernel"))


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    parser.add_argument("--config", type=pathlib.Path, default=CONFIG)
    parser.add_argument("--only", action="append", help="part of a variant's name")
    parser.add_argument("--side", choices=["jax", "torch"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--part", type=int, default=16, help="steps between two waits")
    parser.add_argument("--parts", type=int, default=6, help="after one that warms up")
    parser.add_argument("--shrink", type=int, default=1, help="divides all lengths")
    parser.add_argument("--loop", action="store_true", help="over layers, not unrolled")
    parser.add_argument("--trace", action="append", default=[], help="a variant's name")
    parser.add_argument(
        "--option", action="append", default=[], help="of XLA: xla_…=value"
    )
    parser.add_argument("--seconds", type=float, default=190, help="to start one more")
    parser.add_argument(
        "--out", default="decode_h200.csv", help="in benchmarks/results"
    )
    args = parser.parse_args(arguments)
    with workers.compilation_cache() as environment:
        for module, job in jobs(args).items():
            own = {"JAX_PLATFORMS": "cpu"} if module.endswith("torch") else {}
            for row in workers.start(module, environment | own, [json.dumps(job)]):
                row["overrides"] = " ".join(
                    [*args.overrides, *args.option, *["loop"] * args.loop]
                )
                save(args.out, row, row.pop("kernels", []))


if __name__ == "__main__":
    main()
