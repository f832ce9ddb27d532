"""Conversations whose cache is kept over turns, and ones that are read again each turn.

    python -m benchmarks.run_turns

A decoder with random weights completes prompts in turns, with replies of random tokens
between them; all completions are of full length. "again" samples from all that was
said, in rows wide enough for the last turn, as a rollout with refilled slots does;
"kept" reads the reply alone. Both are measured in turn, in seconds of the process on
all cores; the tokens of greedy runs must be equal.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import results
from jaxmem.models import sampling
from jaxmem.models.decoder import Decoder, ModelConfig

ROWS, PROMPT, COMPLETION, REPLY = 16, 128, 32, 32
SIZES = ModelConfig(
    layers=4, hidden=128, ff=384, heads=4, kv_heads=2, head_dim=32, vocab_size=512
)


def programs(turns, config):
    """The first turn and further ones that keep a cache, and one that does not."""
    model = Decoder(SIZES, rngs=nnx.Rngs(0))
    room = PROMPT + turns * COMPLETION + (turns - 1) * REPLY - 1
    keeping = sampling.Sampler(config, (), 0, room=room)
    plain = sampling.Sampler(config, (), 0)
    keys = sampling.row_keys(jax.random.key(0), np.arange(ROWS))

    def ended(sampler, model, state):
        state = sampler.advance(model, state, COMPLETION)
        return sampling.samples_of(state), state.cache

    def first(model, ids, lengths):
        return ended(keeping, model, keeping.start(model, ids, lengths, keys))

    def further(model, cache, ids, lengths):
        return ended(keeping, model, keeping.resume(model, cache, ids, lengths, keys))

    def again(model, ids, lengths):
        return ended(plain, model, plain.start(model, ids, lengths, keys))[0]

    def shapes(width):
        return jnp.zeros((ROWS, width), int), jnp.zeros(ROWS, int)

    begin = jax.jit(first).lower(model, *shapes(PROMPT))
    cache = begin.out_info[1]
    goes_on = jax.jit(further, donate_argnums=1).lower(model, cache, *shapes(1 + REPLY))
    whole = jax.jit(again).lower(model, *shapes(room + 1 - COMPLETION))
    return model, [program.compile() for program in (begin, goes_on, whole)]


def play(model, compiled, turns, keeps):
    """Tokens of all turns [turns, ROWS, COMPLETION], and the seconds they took."""
    first, further, again = compiled
    rng, width = np.random.default_rng(0), PROMPT + (turns - 1) * (COMPLETION + REPLY)
    said = np.zeros((ROWS, width), np.int64)
    said[:, :PROMPT] = rng.integers(1, SIZES.vocab_size, (ROWS, PROMPT))
    end, made, cache, start = PROMPT, [], None, time.process_time()
    for turn in range(turns):
        lengths = np.full(ROWS, end)
        if not keeps:
            samples = again(model, said, lengths)
        elif turn == 0:
            samples, cache = first(model, said[:, :PROMPT], lengths)
        else:
            lengths = np.full(ROWS, 1 + REPLY)
            news = said[:, end - 1 - REPLY : end]
            samples, cache = further(model, cache, news, lengths)
        made.append(np.asarray(samples.tokens))
        if turn < turns - 1:
            reply = rng.integers(1, SIZES.vocab_size, (ROWS, REPLY))
            after = end + COMPLETION + REPLY
            said[:, end:after] = np.concatenate([made[-1], reply], axis=1)
            end = after
    return np.stack(made), time.process_time() - start


def measure(turns, repetitions):
    """A row for both ways, timed in turn."""
    config = sampling.SamplingConfig(max_new_tokens=COMPLETION, top_k=1)
    model, compiled = programs(turns, config)
    seconds, tokens = {}, {}
    for repetition in range(repetitions + 1):
        for keeps in (False, True):
            tokens[keeps], took = play(model, compiled, turns, keeps)
            if repetition:  # the first one warms up
                seconds.setdefault(keeps, []).append(took)
    np.testing.assert_array_equal(tokens[True], tokens[False])
    kept, again = (float(np.median(seconds[keeps])) for keeps in (True, False))
    steps = PROMPT + turns * COMPLETION + (turns - 1) * REPLY
    sizes = [program.memory_analysis().temp_size_in_bytes for program in compiled]
    return {
        "turns": turns, "rows": ROWS, "prompt_tokens": PROMPT,
        "completion_tokens": COMPLETION, "reply_tokens": REPLY,
        "tokens_read_kept": ROWS * (steps - 1),
        "tokens_read_again": ROWS * sum(
            PROMPT + t * (COMPLETION + REPLY) + COMPLETION - 1 for t in range(turns)
        ),
        "kept_cpu_seconds": f"{kept:.3f}", "again_cpu_seconds": f"{again:.3f}",
        "again_over_kept": f"{again / kept:.2f}",
        "kept_temporary_mib": f"{max(sizes[:2]) / 2**20:.1f}",
        "again_temporary_mib": f"{sizes[2] / 2**20:.1f}",
    }  # fmt: skip


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", default="turns_cpu.csv")
    given = parser.parse_args(arguments)
    rows = []
    for turns in given.turns:
        rows.append(measure(turns, given.repetitions))
        print(rows[-1], flush=True)
    print("wrote", results.write(given.out, rows))


if __name__ == "__main__":
    main()
