"""Gain of a sampler by refilled slots, and by a cache that is kept over turns.

refill: rollouts of four times as many completions as slots are decoded by the sampler's
own loop with a tiny model; lengths are given, not sampled, a hundredth of those meant.
They are lognormal with a deviation of 0.8, in groups of 16: 75% are below 8,192 tokens,
and all end at 16,384, as in Open R1's second update (huggingface.co/blog/open-r1).
`alike` is the share of the variance of their logarithms that is the prompt's. Or they
are published, of Qwen3-1.7B: ten completions of each of 48 prompts of GPQA,
github.com/Zhi0467/cot-loop, commit e4347d4b2b425cb1cae92d14be07f6ecc9cf7aa3,
outputs/weeks/2026-W12/gpqa_prefill_activation_projection_20260321/export. Five of each,
at random, are a rollout, and the others one of the same prompts before. Columns:
`busy`, the share of slots that decode something; without refilling; in the order of the
rollout; longest prompt first by the rollout before; longest first, which would need to
know lengths; what no order exceeds; and with all rows advancing alike, which would need
a cache of each. With a config, a model of its sizes with random weights is timed,
refilled and in parts of as many rows as slots; it divides lengths by 32.

turns: a decoder with random weights completes prompts in turns, with replies of random
tokens between them; all completions are of full length. "again" samples from the whole
conversation, in rows wide enough for the last turn; "kept" reads the reply alone. Both
are measured in turn, in seconds of the process on all cores, and the tokens of greedy
runs must be equal. With a config, the sizes are those of a real model, and seconds
those of the clock: in 16 bits, random weights have logits so close to one another that
rounding decides between them, so that tokens are not compared.
"""

import csv
import dataclasses
import functools
import heapq
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.run_grpo import CONFIGS
from jaxmem import devices
from jaxmem.models import refill, sampling
from jaxmem.models.decoder import Decoder, ModelConfig
from jaxmem.train.configuration import load


def weights_of(sizes):
    """Definition and random weights of a decoder."""

    def build():
        return Decoder(sizes, rngs=nnx.Rngs(0))

    weights = jax.jit(lambda: nnx.split(build())[1])()
    return nnx.split(nnx.eval_shape(build))[0], weights


def compiler_options():
    return sampling.COMPILER_OPTIONS if devices.backend() == "gpu" else {}


# ------------------------------------------------------------------------- refill

SPREAD, BELOW, LIMIT, SCALE = 0.8, 8192, 16384, 100
TIMES, GROUP = 4, 16  # completions per slot; completions of a prompt
ALIKE = (0.0, 0.5, 0.8, 0.9, 1.0)
TINY = ModelConfig(
    layers=1, hidden=8, ff=8, heads=1, kv_heads=1, head_dim=8, vocab_size=4
)


def refilled_slots(slots, rollouts, path=None) -> Iterator[dict]:
    """A row of shares per number of slots and distribution of lengths."""
    for count in slots:
        for alike in ALIKE:
            prompts = TIMES * count // GROUP
            draw = functools.partial(lengths_of, prompts=prompts, alike=alike)
            row = {"lengths": "lognormal", "alike": alike, "deviation": SPREAD}
            yield row | shares(draw, GROUP, LIMIT, rollouts)
    if path:
        lengths = published(path)
        alike, deviation = (f"{x:.2f}" for x in alike_of(lengths))
        row = {"lengths": "published", "alike": alike, "deviation": deviation}
        for limit in (8192, LIMIT, 30000):
            draw = functools.partial(halves_of, lengths=lengths, limit=limit)
            yield row | shares(draw, lengths.shape[1] // 2, limit, rollouts)


def lengths_of(rng, prompts, alike, scale=SCALE):
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


def shares(draw, group, limit, rollouts) -> dict:
    """Mean shares of busy slots over random rollouts, each with the one before it."""
    measured = []
    for seed in range(rollouts):
        lengths, before = draw(np.random.default_rng(seed))
        slots, total = len(lengths) // TIMES, (lengths - 1).sum()
        expected = np.repeat(before.reshape(-1, group).mean(axis=1), group)
        steps = {
            "busy": int(tiny_steps(lengths, slots, group, limit // SCALE)),
            "busy_without": steps_in_parts(lengths, slots),
            "busy_in_order": steps_in_order(lengths, slots),
            "busy_remembered": steps_in_order(
                lengths[np.argsort(-expected, kind="stable")], slots
            ),
            "busy_longest_first": steps_in_order(-np.sort(-lengths), slots),
            "busy_at_most": max(lengths.max() - 1, total / slots),
            "busy_advancing_alike": steps_advancing_alike(lengths, slots),
        }
        measured.append({name: total / (slots * n) for name, n in steps.items()})
    means = {name: np.mean([x[name] for x in measured]) for name in measured[0]}
    return {
        "slots": slots, "completions": len(lengths), "group_size": group,
        "limit": limit, "rollouts": rollouts,
        **{name: f"{mean:.3f}" for name, mean in means.items()},
    }  # fmt: skip


def steps_in_order(lengths, slots):
    """Steps where slots take rows one after the other."""
    ends = [0] * slots
    for length in lengths.tolist():
        heapq.heapreplace(ends, ends[0] + length - 1)
    return max(ends)


def steps_in_parts(lengths, slots):
    """Steps where a rollout is sampled in parts of as many rows as slots."""
    return sum(int(part.max()) - 1 for part in lengths.reshape(-1, slots))


def steps_advancing_alike(lengths, slots):
    """Steps where all rows of a rollout take turns, so that none is started late."""
    live = (lengths[:, None] - 1 > np.arange(lengths.max() - 1)).sum(axis=0)
    return np.maximum(live / slots, 1).sum()


@jax.jit(static_argnums=(1, 2, 3))
def tiny_steps(lengths, slots, group, most):
    """Steps of the sampler's loop with a tiny model."""
    return decode(Decoder(TINY, rngs=nnx.Rngs(0)), lengths, slots, most, group=group)[0]


def decode(model, lengths, slots, most, width=1, group=GROUP):
    """Steps of the sampler's loop, and tokens; rows end at these lengths."""
    n = len(lengths)
    nothing = jnp.zeros((n, most))
    nothing = sampling.SampledTokens(
        nothing.astype(jnp.int32), nothing.astype(bool), nothing, None
    )

    def draw(wanted, steps, logits, none):
        best = jnp.argmax(logits, axis=1).astype(jnp.int32)
        drawn = sampling.SampledTokens(best, ~none, jnp.zeros(len(steps)), None)
        return drawn, none | (steps + 1 == wanted)

    numbers = jnp.arange(n, dtype=jnp.int32) // group
    ids = jnp.tile(numbers[:, None] % 4, (1, width))
    prompts = refill.RefillPrompts(ids, jnp.full(n, width), lengths)
    unroll = devices.backend() == "gpu"
    loop = refill.Refill(nnx.split(model), prompts, slots, most, draw, unroll)
    decoded = loop.run(nothing)
    return jnp.max(decoded.starts + decoded.lengths) - 1, decoded.drawn.tokens


def timed_refill(name, slots, overrides, alike=0.5, scale=32) -> Iterator[dict]:
    """Rows of seconds of a rollout of a model of real size, refilled and in parts."""
    config = load(CONFIGS / name, overrides)[0]
    most, width = LIMIT // scale, 128
    rng = np.random.default_rng(0)
    lengths = lengths_of(rng, TIMES * slots // GROUP, alike, scale)[0]
    definition, weights = weights_of(config.model)

    @jax.jit(compiler_options=compiler_options())
    def run(weights, lengths):
        model = sampling.prepared(nnx.merge(definition, weights))
        return decode(model, lengths, slots, most, width)

    for way, parts in (("refilled", [lengths]), ("parts", np.split(lengths, TIMES))):
        jax.block_until_ready(run(weights, np.full_like(parts[0], 2)))
        start = time.perf_counter()
        steps = sum(int(jax.device_get(run(weights, part))[0]) for part in parts)
        seconds = time.perf_counter() - start
        yield {
            "config": name, "way": way, "slots": slots, "completions": len(lengths),
            "alike": alike, "longest": most, "prompt_tokens": width,
            "tokens": int(lengths.sum()), "steps": steps,
            "busy": f"{(lengths - 1).sum() / (slots * steps):.3f}",
            "seconds": f"{seconds:.2f}",
            "tokens_per_second": round(lengths.sum() / seconds),
        }  # fmt: skip


# -------------------------------------------------------------------------- turns


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A model, and the tokens of its conversations."""

    model: ModelConfig
    rows: int = 16
    prompt: int = 128
    completion: int = 32
    reply: int = 32

    def cached(self, turns):
        """Tokens of a row that are in its cache after the last turn."""
        return self.prompt + turns * self.completion + (turns - 1) * self.reply - 1

    def read_again(self, turns):
        """Tokens that are read where each turn reads the whole conversation."""
        of_turn = self.completion + self.reply
        return sum(
            self.prompt + turn * of_turn + self.completion - 1 for turn in range(turns)
        )


SMALL = Sizes(
    ModelConfig(
        layers=4, hidden=128, ff=384, heads=4, kv_heads=2, head_dim=32, vocab_size=512
    )
)


class TurnPrograms:
    """Compiled programs: a first turn, further ones, and any turn that starts anew."""

    def __init__(self, sizes: Sizes, turns: int):
        self.sizes = sizes
        definition, self.weights = weights_of(sizes.model)
        config = sampling.SamplingConfig(max_new_tokens=sizes.completion, top_k=1)
        room = sizes.cached(turns)
        keeping = sampling.Sampler(config, (), 0, room=room)
        plain = sampling.Sampler(config, (), 0)

        def complete(sampler, begin, weights, *given):
            model = sampling.prepared(nnx.merge(definition, weights))
            keys = sampling.row_keys(jax.random.key(0), jnp.arange(sizes.rows))
            state = begin(sampler, model, *given, keys)
            state = sampler.advance(model, state, sizes.completion)
            return sampling.samples_of(state), state.cache

        def first(weights, ids, lengths):
            return complete(keeping, sampling.Sampler.start, weights, ids, lengths)

        def further(weights, cache, ids, lengths):
            return complete(
                keeping, sampling.Sampler.resume, weights, cache, ids, lengths
            )

        def again(weights, ids, lengths):
            return complete(plain, sampling.Sampler.start, weights, ids, lengths)[0]

        def shapes(width):
            ids = jax.ShapeDtypeStruct((sizes.rows, width), jnp.int32)
            return ids, jax.ShapeDtypeStruct((sizes.rows,), jnp.int32)

        jit = functools.partial(jax.jit, compiler_options=compiler_options())
        lowered = jit(first).lower(self.weights, *shapes(sizes.prompt))
        cache = lowered.out_info[1]
        self.first = lowered.compile()
        lowered = jit(further, donate_argnums=1)
        lowered = lowered.lower(self.weights, cache, *shapes(1 + sizes.reply))
        self.further = lowered.compile()
        lowered = jit(again).lower(self.weights, *shapes(room + 1 - sizes.completion))
        self.again = lowered.compile()


def play(programs: TurnPrograms, turns, keeps: bool, clock) -> tuple[np.ndarray, float]:
    """(tokens of all turns [turns, rows, completion], the seconds that they took)."""
    sizes, weights = programs.sizes, programs.weights
    rng, vocabulary = np.random.default_rng(0), sizes.model.vocab_size
    width = sizes.cached(turns) + 1 - sizes.completion
    ids = np.zeros((sizes.rows, width), np.int32)
    ids[:, : sizes.prompt] = rng.integers(1, vocabulary, (sizes.rows, sizes.prompt))
    end, sampled, cache, start = sizes.prompt, [], None, clock()
    for turn in range(turns):
        lengths = np.full(sizes.rows, end, np.int32)
        if not keeps:
            samples = programs.again(weights, ids, lengths)
        elif turn == 0:
            samples, cache = programs.first(weights, ids[:, : sizes.prompt], lengths)
        else:
            lengths = np.full(sizes.rows, 1 + sizes.reply, np.int32)
            news = ids[:, end - 1 - sizes.reply : end]
            samples, cache = programs.further(weights, cache, news, lengths)
        sampled.append(np.asarray(samples.tokens))
        if turn < turns - 1:
            reply = rng.integers(1, vocabulary, (sizes.rows, sizes.reply))
            after = end + sizes.completion + sizes.reply
            ids[:, end:after] = np.concatenate([sampled[-1], reply], axis=1)
            end = after
    return np.stack(sampled), clock() - start


def turns(counts, repetitions, sizes: Sizes = SMALL, clock=None) -> Iterator[dict]:
    """A row for each number of turns, with both ways, which are timed in turn."""
    clock: Callable[[], float] = clock or time.process_time
    for count in counts:
        programs = TurnPrograms(sizes, count)
        seconds, tokens = {True: [], False: []}, {}
        for repetition in range(repetitions + 1):
            for keeps in (False, True):
                tokens[keeps], taken = play(programs, count, keeps, clock)
                if repetition:  # the first one warms up
                    seconds[keeps].append(taken)
        if sizes.model.dtype == "float32":
            np.testing.assert_array_equal(tokens[True], tokens[False])
        kept, again = (float(np.median(seconds[keeps])) for keeps in (True, False))
        unit = "cpu_seconds" if clock is time.process_time else "seconds"
        yield {
            "turns": count, "rows": sizes.rows, "prompt_tokens": sizes.prompt,
            "completion_tokens": sizes.completion, "reply_tokens": sizes.reply,
            "tokens_read_kept": sizes.rows * sizes.cached(count),
            "tokens_read_again": sizes.rows * sizes.read_again(count),
            f"kept_{unit}": f"{kept:.3f}", f"again_{unit}": f"{again:.3f}",
            "again_over_kept": f"{again / kept:.2f}",
            "kept_temporary_mib": temporary_mib(programs.first, programs.further),
            "again_temporary_mib": temporary_mib(programs.again),
        }  # fmt: skip


def temporary_mib(*programs) -> str:
    sizes = [program.memory_analysis().temp_size_in_bytes for program in programs]
    return f"{max(sizes) / 2**20:.1f}"


def timed_turns(name, counts, repetitions, rows, overrides) -> Iterator[dict]:
    """Rows of a real model's sizes, in seconds of the clock."""
    model = load(CONFIGS / name, overrides)[0].model
    sizes = Sizes(model, rows, prompt=512, completion=128, reply=128)
    for row in turns(counts, repetitions, sizes, time.perf_counter):
        yield {"config": name} | row
