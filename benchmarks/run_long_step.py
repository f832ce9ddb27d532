"""Seconds, tokens/s and GiB of training steps on one long sequence over several GPUs.

    python -m benchmarks.run_long_step --out long_step_h200.csv
    python -m benchmarks.run_long_step data.sequence_length=65536 mesh.sequence=2

Random weights and random ids, in one document a row; the config is `long_step.gin`.
"""

import argparse
import inspect
import pathlib
import time

import jax
import numpy as np

import jaxmem
from benchmarks import results
from jaxmem.data.documents import Batch
from jaxmem.models.partitioning import AXES
from jaxmem.planning import collectives
from jaxmem.train import configuration, precision
from jaxmem.train.jobs import sft
from jaxmem.train.program import gradient_shapes

CONFIG = pathlib.Path(__file__).parent / "long_step.gin"
KEYS = ("tokens", "overrides", "devices", "device", "note")
GIB = 2**30


def batch_of(config, vocab_size) -> Batch:
    """Random ids [1, B, T] and the ones that follow them."""
    shape = 1, config.data.batch_size, config.data.sequence_length
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab_size, shape, dtype=np.int32)
    labels = np.roll(tokens, -1, axis=-1)
    labels[..., -1] = -1
    positions = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
    return Batch(tokens, labels, None, positions)  # pyright: ignore


def types_of(program) -> dict:
    """Columns: types of the trained weights, of moments and of sums of gradients."""
    params, moments = program.state_shapes
    return {
        "weights": precision.types(params),
        "moments": precision.types([x for x in jax.tree.leaves(moments) if x.ndim]),
        "sums": precision.types(gradient_shapes(params)),
    }


def measure(config) -> dict:
    """Columns of one configuration."""
    program = sft.SftProgram(config, config.model.vocab_size, packed=False)
    start = time.perf_counter()
    with jaxmem.report() as report:
        step = program.compile_step(config.head)
    row = {"compile_s": round(time.perf_counter() - start, 1), **account(step)}
    row |= types_of(program)
    row["head"] = report.calls[0].implementation if report.calls else ""
    print(row, flush=True)
    state, frozen = program.initial_state(), program.frozen()
    jax.block_until_ready(state)
    batch = program.layout.place(batch_of(config, config.model.vocab_size))
    seconds, losses = [], []
    for _ in range(config.run.steps):
        start = time.perf_counter()
        state, told = step(state, frozen, batch)
        losses.append(float(told["loss"]))
        seconds.append(time.perf_counter() - start)
        print(f"{seconds[-1]:.2f} s, loss {losses[-1]:.4f}", flush=True)
    peaks = [device.memory_stats() for device in jax.local_devices()]
    median = float(np.median(seconds[1:] or seconds))
    tokens = batch.tokens.size
    row |= {"seconds": round(median, 3), "tokens_per_second": round(tokens / median)}
    row |= {"first_loss": round(losses[0], 4), "last_loss": round(losses[-1], 4)}
    if all(peaks):
        peak = max(stats["peak_bytes_in_use"] for stats in peaks)
        row["device_peak_gib"] = round(peak / GIB, 2)
    return row


def account(step) -> dict:
    """The compiler's bytes of one device, and what it sends."""
    account = step.memory_analysis()
    found = collectives.of(step)
    sent: dict[str, float] = {}
    for c in found:
        sent[c.kind] = sent.get(c.kind, 0) + c.moved * c.times
    beside, all_of_them = collectives.hidden(step.as_text())
    return {
        "collectives": all_of_them,
        "collectives_beside_products": beside,
        "arguments_gib": round(account.argument_size_in_bytes / GIB, 2),
        "temporary_gib": round(account.temp_size_in_bytes / GIB, 2),
        **{f"{k.replace('-', '_')}_gib": round(v / GIB, 2) for k, v in sent.items()},
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    parser.add_argument("--config", type=pathlib.Path, default=CONFIG)
    parser.add_argument("--out", default="long_step.csv", help="in benchmarks/results")
    args = parser.parse_args(arguments)
    config, _ = configuration.load(args.config, args.overrides)
    assert config.run.job == "sft"
    model = config.model
    row = {
        "tokens": config.data.batch_size * config.data.sequence_length,
        "overrides": " ".join(args.overrides),
        "devices": int(np.prod(config.mesh.sizes)),
        **dict(zip(AXES, config.mesh.sizes, strict=True)),
        "layers": model.layers, "hidden": model.hidden, "vocab_size": model.vocab_size,
        **measure(config),
        **results.provenance(),
    }  # fmt: skip
    print(row)
    results.merge(args.out, [row], KEYS)


if __name__ == "__main__":
    main()
