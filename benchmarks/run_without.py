"""Whole steps and decoding without single kernels of the decoder.

    python -m benchmarks.run_without --out decoder_kernels_h100.csv

A kernel that is left out says that it supports nothing, so that XLA does its work: by
a module in its place, in the processes that measure. Steps are those of `run_step`, at
Qwen3-0.6B's widths and Qwen3-8B's with fewer layers and no vocabulary to speak of, and
decoding that of `run_decode` at 8B. Rows are written as they come, and the first and
the last of a kind are of the same program.
"""

import argparse
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator

from benchmarks import results, run_step, workers

KEYS = ("what", "without", "again", "jax", "device", "sampling")
SITE = """
import os, sys, types
for name in filter(None, os.environ.get("JAXMEM_WITHOUT", "").split(",")):
    module = types.ModuleType("jaxmem.kernels." + name)
    module.supports = lambda *_: False
    sys.modules[module.__name__] = module
"""
NORMS = "normed_rotary", "residual_norm"
DECODE = "cached_attention", "rotary"
SMALL = ("model.layers=14", "run.steps=15")
LARGE = (
    "model.layers=3", "model.hidden=4096", "model.ff=12288", "model.heads=32",
    "run.steps=12",
)  # fmt: skip
STEPS = {
    "0.6B, none": (f"none {run_step.UNROLLED}", SMALL),
    "8B, none": (f"none {run_step.UNROLLED}", LARGE),
    "0.6B, full": ("full", SMALL),
}


def sets(names: tuple[str, ...]) -> list[str]:
    """What is left out, one run after another."""
    return ["", *names, ",".join(names), ""]


def steps(what: str, environment: dict[str, str], seconds: float) -> Iterator[dict]:
    """A row for each set of kernels; while one is measured, the next is traced."""
    words, overrides = STEPS[what]
    variant = run_step.Variant(what, "jax", tuple(words.split()), run_step.SMALL)
    job = variant.job(str(run_step.CONFIG), list(overrides), [])
    end, started, every = time.monotonic() + seconds, [], sets(NORMS)
    for i, without in enumerate(every):
        for name in every[len(started) : i + 2]:
            own = environment | {"JAXMEM_WITHOUT": name}
            started.append(run_step.Worker(variant, job, own))
        for row in started[i].rows(max(end - time.monotonic(), 1)):
            row.pop("shares", None)
            yield {"what": what, "without": without, "again": int(i > 3), **row}


def decoding(environment: dict[str, str], seconds: float) -> Iterator[dict]:
    """Rows of greedy and of top-p for each set of kernels."""
    end = time.time() + seconds
    variants = [(name, name, 128, 128) for name in ("greedy", "top_p=0.95")]
    for i, without in enumerate([*sets(DECODE)[:-1], ",".join(NORMS), ""]):
        job = {
            "config": "configs/grpo_qwen3_8b_h200.gin", "overrides": [], "rows": 64,
            "part": 16, "parts": 6, "loop": False, "options": {}, "until": end,
            "variants": variants, "trace": ["greedy"] if i in (0, 3) else [],
        }  # fmt: skip
        own = environment | {"JAXMEM_WITHOUT": without}
        if time.time() < end:
            for row in workers.start("benchmarks.decode_jax", own, [json.dumps(job)]):
                for kernel in row.pop("kernels", []):
                    print("   ", without, *kernel.values(), flush=True)
                yield {"what": "decode", "without": without, "again": int(i > 4), **row}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", default="decoder_kernels_h100.csv")
    parser.add_argument("--seconds", type=float, default=340.0)
    parser.add_argument("--what", action="append", help="decode, or steps of a kind")
    args = parser.parse_args(arguments)
    end = time.monotonic() + args.seconds
    with (
        workers.compilation_cache() as environment,
        tempfile.TemporaryDirectory() as at,
    ):
        (pathlib.Path(at) / "sitecustomize.py").write_text(SITE)
        path = [at, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
        for what in args.what or ("0.6B, none", "decode", "8B, none", "0.6B, full"):
            left = end - time.monotonic()
            if left < 20:
                print(f"no time is left for {what}")
                continue
            run = decoding(environment, left) if what == "decode" else steps(
                what, environment, left
            )  # fmt: skip
            for row in run:
                print(row, flush=True)
                results.merge(args.out, [row], KEYS)


if __name__ == "__main__":
    main()
