"""The share of slots that decode something, when slots are refilled.

    python -m benchmarks.run_refill

Rollouts of four times as many completions as slots, in groups of 16, are decoded by the
sampler's own loop with a tiny model; lengths are given instead of sampled, a hundredth
of those meant. They are lognormal with a deviation of 0.8: 75% are below 8,192 tokens,
and all end at 16,384, as in Open R1's second update (huggingface.co/blog/open-r1). How
much alike those of a prompt are is not published: `alike` is the share of the variance
of their logarithms that is the prompt's. Beside it: without refilling, in the order of
the rollout, and longest first, which would need to know lengths before.
"""

import argparse
import heapq

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import results
from jaxmem.models import refill
from jaxmem.models.decoder import Decoder, ModelConfig
from jaxmem.models.sampling import Drawn

SPREAD, BELOW, LIMIT, SCALE = 0.8, 8192, 16384, 100
TIMES, GROUP = 4, 16
SIZES = ModelConfig(
    layers=1, hidden=8, ff=8, heads=1, kv_heads=1, head_dim=8, vocab_size=4
)


def lengths_of(rng, prompts, alike):
    """Tokens of each completion, a hundredth of them."""
    of_prompt = np.repeat(rng.standard_normal(prompts), GROUP)
    own = rng.standard_normal(prompts * GROUP)
    z = alike**0.5 * of_prompt + (1 - alike) ** 0.5 * own
    lengths = BELOW * np.exp(SPREAD * (z - 0.6745))
    return np.clip(lengths / SCALE, 2, LIMIT // SCALE).astype(np.int32)


@jax.jit(static_argnums=1)
def refilled(lengths, slots):
    """Steps of the sampler's loop, with rows that end at these lengths."""
    rows, most = len(lengths), LIMIT // SCALE
    nothing = jnp.zeros((rows, most))
    nothing = Drawn(nothing.astype(int), nothing.astype(bool), nothing, None)

    def draw(wanted, steps, logits, none):
        zeros = jnp.zeros(len(steps))
        drawn = Drawn(zeros.astype(int), ~none, zeros, None)
        return drawn, none | (steps + 1 == wanted)

    numbers = jnp.arange(rows, dtype=jnp.int32) // GROUP
    given = refill.Prompts(numbers[:, None] % 4, jnp.ones(rows, int), lengths)
    model = nnx.split(Decoder(SIZES, rngs=nnx.Rngs(0)))
    loop = refill.Refill(model, given, slots, most, draw, unroll=False)
    decoded = loop.run(nothing)
    return jnp.max(decoded.starts + decoded.lengths) - 1


def in_order(lengths, slots):
    """Steps where slots take rows one after the other."""
    ends = [0] * slots
    for length in lengths.tolist():
        heapq.heapreplace(ends, ends[0] + length - 1)
    return max(ends)


def together(lengths, slots):
    """Steps where a rollout is sampled in parts of as many rows as slots."""
    return sum(int(part.max()) - 1 for part in lengths.reshape(-1, slots))


def measure(slots, alike, repetitions):
    """Mean shares over random rollouts."""
    shares = []
    for seed in range(repetitions):
        rng = np.random.default_rng(seed)
        lengths = lengths_of(rng, TIMES * slots // GROUP, alike)
        steps = (
            int(refilled(lengths, slots)), together(lengths, slots),
            in_order(lengths, slots), in_order(-np.sort(-lengths), slots),
        )  # fmt: skip
        shares.append((lengths - 1).sum() / (slots * np.array(steps)))
    names = "busy", "busy_without", "busy_in_order", "busy_longest_first"
    means = np.mean(shares, axis=0)
    return {
        "slots": slots, "completions": TIMES * slots, "group_size": GROUP,
        "alike": alike, "rollouts": repetitions,
        **{name: f"{mean:.3f}" for name, mean in zip(names, means, strict=True)},
    }  # fmt: skip


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=10)
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--out", default="refill_cpu.csv")
    given = parser.parse_args(arguments)
    rows = []
    for slots in given.slots:
        for alike in (0.0, 0.5, 0.8, 0.9, 1.0):
            rows.append(measure(slots, alike, given.rollouts))
            print(rows[-1], flush=True)
    print("wrote", results.write(given.out, rows))


if __name__ == "__main__":
    main()
