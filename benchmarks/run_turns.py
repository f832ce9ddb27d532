"""Conversations whose cache is kept over turns, and ones that are read again each turn.

    python -m benchmarks.run_turns
    python -m benchmarks.run_turns --timed grpo_qwen3_8b_h200.gin --out turns_h100.csv

A decoder with random weights completes prompts in turns, with replies of random tokens
between them; all completions are of full length. "again" samples from all that was
said, in rows wide enough for the last turn; "kept" reads the reply alone. Both are
measured in turn, in seconds of the process on all cores, and the tokens of greedy runs
must be equal. The second command has the sizes of a real model, and seconds of the
clock: in 16 bits, random weights have logits so close to one another that rounding
decides between them, so that tokens are not compared.
"""

import argparse
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import results
from benchmarks.run_grpo import CONFIGS
from jaxmem import devices
from jaxmem.models import sampling
from jaxmem.models.decoder import Decoder, ModelConfig
from jaxmem.train.configuration import load


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and tokens of its conversations."""

    model: ModelConfig
    rows: int
    prompt: int
    completion: int
    reply: int

    def read(self, turns):
        """Tokens of a row that are in its cache after the last turn."""
        return self.prompt + turns * self.completion + (turns - 1) * self.reply - 1


SMALL = Case(
    ModelConfig(
        layers=4, hidden=128, ff=384, heads=4, kv_heads=2, head_dim=32, vocab_size=512
    ),
    rows=16, prompt=128, completion=32, reply=32,
)  # fmt: skip
LONG = {"prompt": 512, "completion": 128, "reply": 128}  # of a real model


def weights_of(sizes):
    """Definition and random weights of a decoder."""

    @jax.jit
    def weights():
        return nnx.split(Decoder(sizes, rngs=nnx.Rngs(0)))[1]

    shape = nnx.eval_shape(lambda: Decoder(sizes, rngs=nnx.Rngs(0)))
    return nnx.split(shape)[0], weights()


def programs(turns, case):
    """The first turn and further ones that keep a cache, and one that does not."""
    definition, weights = weights_of(case.model)
    config = sampling.SamplingConfig(max_new_tokens=case.completion, top_k=1)
    room, rows = case.read(turns), case.rows
    keeping = sampling.Sampler(config, (), 0, room=room)
    plain = sampling.Sampler(config, (), 0)

    def ended(sampler, weights, begin, *given):
        model = sampling.prepared(nnx.merge(definition, weights))
        keys = sampling.row_keys(jax.random.key(0), jnp.arange(rows))
        state = begin(sampler, model, *given, keys)
        state = sampler.advance(model, state, case.completion)
        return sampling.samples_of(state), state.cache

    def first(weights, ids, lengths):
        return ended(keeping, weights, sampling.Sampler.start, ids, lengths)

    def further(weights, cache, ids, lengths):
        return ended(keeping, weights, sampling.Sampler.resume, cache, ids, lengths)

    def again(weights, ids, lengths):
        return ended(plain, weights, sampling.Sampler.start, ids, lengths)[0]

    def shapes(width):
        ids = jax.ShapeDtypeStruct((rows, width), jnp.int32)
        return ids, jax.ShapeDtypeStruct((rows,), jnp.int32)

    options = {}
    if devices.backend() == "gpu":
        options["compiler_options"] = sampling.COMPILER_OPTIONS
    begin = jax.jit(first, **options).lower(weights, *shapes(case.prompt))
    goes_on = jax.jit(further, donate_argnums=1, **options)
    goes_on = goes_on.lower(weights, begin.out_info[1], *shapes(1 + case.reply))
    whole = jax.jit(again, **options)
    whole = whole.lower(weights, *shapes(room + 1 - case.completion))
    return weights, [program.compile() for program in (begin, goes_on, whole)]


def play(case, weights, compiled, turns, keeps, clock):
    """Tokens of all turns [turns, rows, completion], and the seconds they took."""
    first, further, again = compiled
    rng, vocabulary = np.random.default_rng(0), case.model.vocab_size
    rows, reply_size = case.rows, case.reply
    said = np.zeros((rows, case.read(turns) + 1 - case.completion), np.int32)
    said[:, : case.prompt] = rng.integers(1, vocabulary, (rows, case.prompt))
    end, sampled, cache, start = case.prompt, [], None, clock()
    for turn in range(turns):
        lengths = np.full(rows, end, np.int32)
        if not keeps:
            samples = again(weights, said, lengths)
        elif turn == 0:
            samples, cache = first(weights, said[:, : case.prompt], lengths)
        else:
            lengths = np.full(rows, 1 + reply_size, np.int32)
            news = said[:, end - 1 - reply_size : end]
            samples, cache = further(weights, cache, news, lengths)
        sampled.append(np.asarray(samples.tokens))
        if turn < turns - 1:
            reply = rng.integers(1, vocabulary, (rows, reply_size))
            after = end + case.completion + reply_size
            said[:, end:after] = np.concatenate([sampled[-1], reply], axis=1)
            end = after
    return np.stack(sampled), clock() - start


def measure(turns, repetitions, case, clock):
    """A row for both ways, timed in turn."""
    weights, compiled = programs(turns, case)
    seconds, tokens = {}, {}
    for repetition in range(repetitions + 1):
        for keeps in (False, True):
            tokens[keeps], took = play(case, weights, compiled, turns, keeps, clock)
            if repetition:  # the first one warms up
                seconds.setdefault(keeps, []).append(took)
    if case.model.dtype == "float32":
        np.testing.assert_array_equal(tokens[True], tokens[False])
    kept, again = (float(np.median(seconds[keeps])) for keeps in (True, False))
    spent = "cpu_seconds" if clock is time.process_time else "seconds"
    read, of_turn = case.read(turns), case.completion + case.reply
    sizes = [program.memory_analysis().temp_size_in_bytes for program in compiled]
    return {
        "turns": turns, "rows": case.rows, "prompt_tokens": case.prompt,
        "completion_tokens": case.completion, "reply_tokens": case.reply,
        "tokens_read_kept": case.rows * read,
        "tokens_read_again": case.rows * sum(
            case.prompt + t * of_turn + case.completion - 1 for t in range(turns)
        ),
        f"kept_{spent}": f"{kept:.3f}", f"again_{spent}": f"{again:.3f}",
        "again_over_kept": f"{again / kept:.2f}",
        "kept_temporary_mib": f"{max(sizes[:2]) / 2**20:.1f}",
        "again_temporary_mib": f"{sizes[2] / 2**20:.1f}",
    }  # fmt: skip


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", default="turns_cpu.csv")
    parser.add_argument("--timed", metavar="CONFIG", help="sizes of a real model")
    parser.add_argument("--rows", type=int, default=32, help="of a real model")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args(arguments)
    case, clock, named = SMALL, time.process_time, {}
    if given.timed:
        model = load(CONFIGS / given.timed, given.overrides)[0].model
        case, clock = Case(model, given.rows, **LONG), time.perf_counter
        named = {"config": given.timed}
    rows = []
    for turns in given.turns:
        measured = measure(turns, given.repetitions, case, clock)
        rows.append(named | measured)
        print(rows[-1], flush=True)
    print("wrote", results.write(given.out, rows))


if __name__ == "__main__":
    main()
