"""The share of slots that decode something, when slots are refilled.

    python -m benchmarks.run_refill --published rollout_projection.csv
    python -m benchmarks.run_refill --timed grpo_qwen3_8b_h200.gin --out refill_h100.csv
    python -m benchmarks.run_refill --timed grpo_qwen3_8b_h200.gin \
        --published rollout_projection.csv --scale 4 --out refill_h200.csv

Rollouts of four times as many completions as slots are decoded by the sampler's own
loop with a tiny model; lengths are given, not sampled: a hundredth of those meant.
They are lognormal with a deviation of 0.8, in groups of 16: 75% are below 8,192 tokens,
and all end at 16,384, as in Open R1's second update (huggingface.co/blog/open-r1).
`alike` is the share of the variance of their logarithms that is the prompt's.

Or they are published, of Qwen3-1.7B: ten completions of each of 48 prompts of GPQA,
github.com/Zhi0467/cot-loop, commit e4347d4b2b425cb1cae92d14be07f6ecc9cf7aa3,
outputs/weeks/2026-W12/gpqa_prefill_activation_projection_20260321/export. Five of each,
at random, are a rollout, and the others one of the same prompts before.

Beside it: without refilling, in the order of the rollout, longest prompt first by the
rollout before, longest first, which would need to know lengths, what no order exceeds,
and with all rows advancing alike, which would need a cache of each. The second command
times a model of these sizes with random weights, refilled and in parts of as many rows
as slots; it divides lengths by 32, or by --scale.
"""

import argparse
import csv
import functools
import heapq
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import results
from benchmarks.run_grpo import CONFIGS
from jaxmem.models import refill, sampling
from jaxmem.models.decoder import Decoder, ModelConfig
from jaxmem.models.sampling import Drawn
from jaxmem.train.configuration import load

SPREAD, BELOW, LIMIT, SCALE = 0.8, 8192, 16384, 100
TIMES, GROUP = 4, 16
SIZES = ModelConfig(
    layers=1, hidden=8, ff=8, heads=1, kv_heads=1, head_dim=8, vocab_size=4
)


def weights_of(sizes):
    """Definition and random weights of a decoder."""

    @jax.jit
    def weights():
        return nnx.split(Decoder(sizes, rngs=nnx.Rngs(0)))[1]

    shape = nnx.eval_shape(lambda: Decoder(sizes, rngs=nnx.Rngs(0)))
    return nnx.split(shape)[0], weights()


def lengths_of(rng, prompts, alike, scale):
    """Tokens of completions, divided by a scale: two rollouts [2, N] of the prompts."""
    of_prompt = np.repeat(rng.standard_normal(prompts), GROUP)
    own = rng.standard_normal((2, prompts * GROUP))
    z = alike**0.5 * of_prompt + (1 - alike) ** 0.5 * own
    lengths = BELOW * np.exp(SPREAD * (z - 0.6745))
    return np.clip(lengths / scale, 2, LIMIT // scale).astype(np.int32)


def published(path):
    """Tokens [P, 2G] of completions of P prompts."""
    prompts = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            of_prompt = prompts.setdefault((row["split"], row["sample_id"]), [])
            of_prompt.append(int(row["length"]))
    return np.array([*prompts.values()])


def alike_of(lengths):
    """The share of the variance of logarithms that is the prompt's, and its root."""
    logs = np.log(lengths)
    own = logs.var(axis=1, ddof=1).mean()
    of_prompt = logs.mean(axis=1).var(ddof=1) - own / lengths.shape[1]
    return of_prompt / (of_prompt + own), (of_prompt + own) ** 0.5


def halves_of(rng, lengths, limit):
    """Two rollouts [2, N] of half of the completions of each prompt."""
    half = np.hsplit(np.clip(rng.permuted(lengths, axis=1), 2 * SCALE, limit), 2)
    return np.stack(half).reshape(2, -1).astype(np.int32) // SCALE


def decode(model, lengths, slots, most, width=1, group=GROUP):
    """Steps of the sampler's loop, and tokens; rows end at these lengths."""
    rows = len(lengths)
    nothing = jnp.zeros((rows, most))
    nothing = Drawn(nothing.astype(jnp.int32), nothing.astype(bool), nothing, None)

    def draw(wanted, steps, logits, none):
        best = jnp.argmax(logits, axis=1).astype(jnp.int32)
        drawn = Drawn(best, ~none, jnp.zeros(len(steps)), None)
        return drawn, none | (steps + 1 == wanted)

    numbers = jnp.arange(rows, dtype=jnp.int32) // group
    prompts = jnp.tile(numbers[:, None] % 4, (1, width))
    given = refill.Prompts(prompts, jnp.full(rows, width), lengths)
    unroll = jax.default_backend() == "gpu"
    loop = refill.Refill(nnx.split(model), given, slots, most, draw, unroll)
    decoded = loop.run(nothing)
    return jnp.max(decoded.starts + decoded.lengths) - 1, decoded.drawn.tokens


@jax.jit(static_argnums=(1, 2, 3))
def refilled(lengths, slots, group, most):
    """Steps of `decode` by a tiny model."""
    model = Decoder(SIZES, rngs=nnx.Rngs(0))
    return decode(model, lengths, slots, most, group=group)[0]


def drawn(slots, scale):
    """Tokens [N] of a rollout of lognormal lengths, their limit, group and columns."""
    lengths = lengths_of(np.random.default_rng(0), TIMES * slots // GROUP, 0.5, scale)
    return lengths[0], LIMIT // scale, GROUP, {"lengths": "lognormal", "alike": 0.5}


def of_file(path, limit, scale, seed):
    """The same of published lengths, cut to a limit and divided by a scale."""
    of_prompts = published(path)
    group = of_prompts.shape[1] // 2
    rng = np.random.default_rng(seed)
    half = np.hsplit(np.clip(rng.permuted(of_prompts, axis=1), 2 * scale, limit), 2)[0]
    lengths = half.reshape(-1).astype(np.int32) // scale
    alike = float(f"{alike_of(of_prompts)[0]:.2f}")
    return lengths, limit // scale, group, {"lengths": "published", "alike": alike}


def timed(name, case, overrides):
    """Seconds of a rollout of a model of real size, refilled and in parts."""
    config = load(CONFIGS / name, overrides)[0]
    (lengths, most, group, columns), width = case, 128
    slots = len(lengths) // TIMES
    definition, held = weights_of(config.model)

    @jax.jit(compiler_options=sampling.COMPILER_OPTIONS)
    def run(held, lengths):
        model = sampling.prepared(nnx.merge(definition, held))
        return decode(model, lengths, slots, most, width, group)

    for way, parts in (("refilled", [lengths]), ("parts", np.split(lengths, TIMES))):
        jax.block_until_ready(run(held, np.full_like(parts[0], 2)))
        start = time.perf_counter()
        steps = sum(int(jax.device_get(run(held, part))[0]) for part in parts)
        seconds = time.perf_counter() - start
        yield {
            "config": name, "way": way, "slots": slots, "completions": len(lengths),
            **columns, "longest": most, "prompt_tokens": width,
            "tokens": int(lengths.sum()), "steps": steps,
            "busy": f"{(lengths - 1).sum() / (slots * steps):.3f}",
            "seconds": f"{seconds:.2f}",
            "tokens_per_second": round(lengths.sum() / seconds),
        }  # fmt: skip


def in_order(lengths, slots):
    """Steps where slots take rows one after the other."""
    ends = [0] * slots
    for length in lengths.tolist():
        heapq.heapreplace(ends, ends[0] + length - 1)
    return max(ends)


def advancing_alike(lengths, slots):
    """Steps where all rows of a rollout take turns, so that none is started late.

    It needs to know no length, but the keys and values of all rows.
    """
    live = (lengths[:, None] - 1 > np.arange(lengths.max() - 1)).sum(axis=0)
    return np.maximum(live / slots, 1).sum()


def together(lengths, slots):
    """Steps where a rollout is sampled in parts of as many rows as slots."""
    return sum(int(part.max()) - 1 for part in lengths.reshape(-1, slots))


def measure(draw, group, limit, repetitions):
    """Mean shares over random rollouts, which are drawn with those before them."""
    shares = []
    for seed in range(repetitions):
        lengths, before = draw(np.random.default_rng(seed))
        slots, total = len(lengths) // TIMES, (lengths - 1).sum()
        seen = np.repeat(before.reshape(-1, group).mean(axis=1), group)
        steps = (
            int(refilled(lengths, slots, group, limit // SCALE)),
            together(lengths, slots), in_order(lengths, slots),
            in_order(lengths[np.argsort(-seen, kind="stable")], slots),
            in_order(-np.sort(-lengths), slots), max(lengths.max() - 1, total / slots),
            advancing_alike(lengths, slots),
        )  # fmt: skip
        shares.append(total / (slots * np.array(steps)))
    names = (
        "busy", "busy_without", "busy_in_order", "busy_remembered",
        "busy_longest_first", "busy_at_most", "busy_advancing_alike",
    )  # fmt: skip
    means = np.mean(shares, axis=0)
    return {
        "slots": slots, "completions": len(lengths), "group_size": group,
        "limit": limit, "rollouts": repetitions,
        **{name: f"{mean:.3f}" for name, mean in zip(names, means, strict=True)},
    }  # fmt: skip


def lognormal(slots, alike, repetitions):
    """Of lengths drawn from the distribution above."""
    prompts = TIMES * slots // GROUP
    draw = functools.partial(lengths_of, prompts=prompts, alike=alike, scale=SCALE)
    row = {"lengths": "lognormal", "alike": alike, "deviation": SPREAD}
    return row | measure(draw, GROUP, LIMIT, repetitions)


def resampled(lengths, limit, repetitions):
    """Of published lengths [P, 2G], cut to a limit."""
    draw = functools.partial(halves_of, lengths=lengths, limit=limit)
    alike, deviation = (f"{x:.2f}" for x in alike_of(lengths))
    row = {"lengths": "published", "alike": alike, "deviation": deviation}
    return row | measure(draw, lengths.shape[1] // 2, limit, repetitions)


def printed(row):
    print(row, flush=True)
    return row


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--out", default="refill_cpu.csv")
    parser.add_argument("--timed", metavar="CONFIG", help="sizes of a real model")
    parser.add_argument("--published", metavar="CSV", help="measure its lengths, too")
    parser.add_argument("--scale", type=int, default=32, help="divides lengths")
    parser.add_argument("--limit", type=int, default=8192, help="of published ones")
    parser.add_argument("--seed", type=int, default=0, help="of published ones")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args(arguments)
    rows = []
    if given.timed:
        case = drawn(given.slots[0], given.scale)
        if given.published:
            case = of_file(given.published, given.limit, given.scale, given.seed)
        for row in map(printed, timed(given.timed, case, given.overrides)):
            rows.append(row)
            results.write(given.out, rows)
        return
    for slots in given.slots:
        for alike in (0.0, 0.5, 0.8, 0.9, 1.0):
            rows.append(printed(lognormal(slots, alike, given.rollouts)))
    if given.published:
        lengths = published(given.published)
        for limit in (8192, 16384, 30000):
            rows.append(printed(resampled(lengths, limit, given.rollouts)))
    print("wrote", results.write(given.out, rows))


if __name__ == "__main__":
    main()
