"""Tokens/s, MFU and GiB of whole training steps, ours and torch's, on one card.

    python -m benchmarks.run_step --seconds 460 --trace none --trace full
    python -m benchmarks.run_step --only torch --out step_h200.csv
    python -m benchmarks.run_step --variant "mine: save_attention remat.save=('gate',)"
    python -m benchmarks.run_step --variant "theirs: torch compiled model.layers=4"
    python -m benchmarks.run_step --config benchmarks/gemma_step.gin --vocab 262144 \
        --variant "none: none remat.unroll=True" --variant "torch: torch compiled"

Each variant runs in a process of its own, so that its peak of memory is its own, and
one at a time; while one runs, the next one imports and traces. Rows are written as
they come, and no variant starts, or goes on, after `--seconds`. As in the trainer, a
step is dispatched before the loss of the one before is read, and its time is from
that one's end to its own: `loss_read` says so, and where it is empty, each loss was
read first. The config is `step.gin`; variants add to it. With `loss=logprobs`, the
loss is a mean of `head.logprobs`, whose backward pass recomputes the logits, instead
of `head.loss`, which is one pass. A trace's summary, by class of kernel, and the
kernels that take most go into a file of their own.
"""

import argparse
import contextlib
import dataclasses
import inspect
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from benchmarks import results, workers

CONFIG = pathlib.Path(__file__).parent / "step.gin"
KEYS = ("variant", "vocab_size", "overrides", "device")
SMALL, LARGE = 1024, 151_936
UNROLLED = "remat.unroll=True"
SAMPLED = "head.gradient=('sample',128)"
LARGER = "head.chunk=4096"  # than the default, 1024
FEED_FORWARD = "full remat.save=('block_mid','gate','up','attn_out','attn_lse')"
GATE = "save_attention remat.save=('gate',)"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A case to measure: a policy of ours and words, or one of torch's modes."""

    name: str
    side: str  # "jax" or "torch"
    words: tuple[str, ...]  # first a policy, or a mode; then section.field=, xla_…=
    vocab_size: int | None = None  # None: that of the config
    config: str | None = None  # None: that of the command line
    lengths: str = "full"  # of documents (benchmarks.step_rows)

    def job(self, config: str, overrides: list[str], traced: list[str]) -> dict:
        """The job that a worker reads."""
        first, *rest = self.words
        options = dict(w.split("=", 1) for w in rest if w.startswith("xla_"))
        more = [word for word in rest if not word.startswith(("xla_", "loss="))]
        if self.side == "jax":
            more = [f"remat.policy={first}", *more]
        if self.vocab_size is not None:
            more = [f"model.vocab_size={self.vocab_size}", *more]
        return {
            "config": self.config or config,
            "mode": first,
            "lengths": self.lengths,
            "overrides": [*more, *overrides],
            "options": options,
            "loss": "logprobs" if "loss=logprobs" in rest else "",
            "trace": self.name in traced,
        }


def _jax(text, vocab_size=SMALL, name=None):
    return Variant(name or text, "jax", tuple(text.split()), vocab_size)


def _torch(mode, vocab_size):
    return Variant(f"torch {mode}", "torch", (mode,), vocab_size)


def _named(name, words, vocab_size):
    side = "torch" if words[0] == "torch" else "jax"
    return Variant(name, side, tuple(words[side == "torch" :]), vocab_size)


# Those first that a table needs, as time may run out; those that take long to compile
# apart, as the next two are compiled while one is measured.
VARIANTS = [
    _jax(f"none {UNROLLED}", name="none"),
    _jax("full"),
    _jax(f"{GATE} {UNROLLED}", name="save_attention and gate, no loop"),
    _torch("compiled", SMALL),
    _jax(f"{FEED_FORWARD} {UNROLLED}", name="feed-forward and attention, no loop"),
    _jax("full", LARGE),
    _jax(f"none {UNROLLED}", LARGE, "none"),
    _torch("compiled", LARGE),
    _jax(f"none {UNROLLED} {SAMPLED}", LARGE, "none, sampled"),
    _jax(f"full {SAMPLED}", LARGE, "full, sampled"),
    _jax(f"dots_and_attention {UNROLLED}", name="dots_and_attention, no loop"),
    _jax("dots_and_attention"),
    _jax("offload_block"),
    _jax(GATE, name="save_attention and gate"),
    _jax("full loss=logprobs", LARGE, "full, loss of logprobs"),
    _torch("checkpoint_compiled", SMALL),
    _jax("dots"),
    _jax("none", name="none, loop"),
    _torch("checkpoint", LARGE),
    _jax(f"full {UNROLLED}", name="full, no loop"),
    _jax("none xla_gpu_enable_dynamic_slice_fusion=True", name="none, fused slices"),
    _torch("checkpoint", SMALL),
    _jax(f"none {UNROLLED} {LARGER}", LARGE, "none, chunk=4096"),
    _jax(f"none {UNROLLED} {SAMPLED} {LARGER}", LARGE, "none, sampled, chunk=4096"),
    _jax(f"full {LARGER}", LARGE, "full, chunk=4096"),
    _jax(f"full {SAMPLED} {LARGER}", LARGE, "full, sampled, chunk=4096"),
]


class Worker:
    """A process that prepares at once, and measures when it is told to."""

    def __init__(self, variant: Variant, job: dict, environment: dict[str, str]):
        self.variant = variant
        own = {"JAX_PLATFORMS": "cpu"} if variant.side == "torch" else {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.step_{variant.side}", json.dumps(job)],
            env={**os.environ, **environment, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def rows(self, seconds: float) -> Iterator[dict]:
        """Measure; what the process sends before that many seconds are over."""
        limit = threading.Timer(seconds, self.stop)
        limit.start()
        try:
            assert self._process.stdin is not None and self._process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write("go\n")
                self._process.stdin.close()
            for line in self._process.stdout:
                if line.startswith(workers.MARK):
                    yield json.loads(line.removeprefix(workers.MARK))
                else:
                    print(line, end="", flush=True)
            if self._process.wait():
                print(f"{self.variant.name}: exit code {self._process.returncode}")
        finally:
            limit.cancel()

    def stop(self) -> None:
        """End the process, wherever it is."""
        self._process.kill()


def measure(
    variants: list[Variant], args: argparse.Namespace, environment: dict[str, str]
) -> Iterator[tuple[Variant, dict]]:
    """Each variant's row, while time is left."""
    end = time.monotonic() + args.seconds
    started: list[Worker] = []

    def start(variant):
        job = variant.job(str(args.config), args.overrides, args.trace)
        started.append(Worker(variant, job, environment))

    try:
        for i, variant in enumerate(variants):
            for ahead in variants[len(started) : i + 2]:
                start(ahead)
            left = end - time.monotonic()
            if left < args.least:
                skipped = ", ".join(each.name for each in variants[i:])
                print(f"{left:.0f} s are left, not measured: {skipped}", flush=True)
                return
            for row in started[i].rows(left):
                yield variant, row
    finally:
        for worker in started:
            worker.stop()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    parser.add_argument("--config", type=pathlib.Path, default=CONFIG)
    parser.add_argument("--only", action="append", help="part of a variant's name")
    parser.add_argument("--side", choices=["jax", "torch"])
    parser.add_argument("--vocab", type=int, help="of the variants listed, those alone")
    parser.add_argument(
        "--variant", action="append", default=[], help="NAME: [torch] POLICY …"
    )
    parser.add_argument("--trace", action="append", default=[], help="a variant's name")
    parser.add_argument("--seconds", type=float, default=460.0)
    parser.add_argument("--least", type=float, default=30.0, help="to start one more")
    parser.add_argument("--out", default="step_h200.csv", help="in benchmarks/results")
    args = parser.parse_args(arguments)
    chosen = chosen_variants(args)
    began = time.monotonic()
    with workers.compilation_cache() as environment:
        for variant, row in measure(chosen, args, environment):
            row = {
                "variant": variant.name,
                "vocab_size": variant.vocab_size,
                "overrides": " ".join(args.overrides),
                **row,
            }
            shares = row.pop("shares", [])
            print(f"{time.monotonic() - began:.0f} s: {row}", flush=True)
            results.merge(args.out, [row], KEYS)
            save_shares(args.out, row, shares)


def chosen_variants(args: argparse.Namespace) -> list[Variant]:
    """The variants of --variant, or those that --only, --side and --vocab leave."""
    if args.variant:
        size = args.vocab or SMALL
        named = (text.partition(":") for text in args.variant)
        return [_named(name, words.split(), size) for name, _, words in named]
    found = [
        each for each in VARIANTS
        if (not args.only or any(part in each.name for part in args.only))
        and args.side in (None, each.side)
        and args.vocab in (None, each.vocab_size)
    ]  # fmt: skip
    if not found:
        names = ", ".join(dict.fromkeys(each.name for each in VARIANTS))
        raise SystemExit(f"no variant is left; there are: {names}")
    return found


def save_shares(out: str, row: dict, shares: list[dict], keys=KEYS) -> None:
    """Rows of a trace's summary, into `*_trace.csv` beside the result.

    `keys` are columns that tell the result's rows apart.
    """
    same = {key: row.get(key, "") for key in (*keys, "jax", "date")}
    rows = [{**same, **share} for share in shares]
    for line in rows:
        if not line.get("kernel"):
            print({key: line[key] for key in ("class", "ms", "share", "kernels")})
    if rows:
        path = pathlib.Path(out)
        path = path.with_name(f"{path.stem}_trace.csv")
        results.merge(path, rows, (*keys, "class", "kernel"))


if __name__ == "__main__":
    main()
