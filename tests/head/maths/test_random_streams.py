"""No two random streams of jobs and commands share numbers."""

import ast
import functools
import itertools
import types
from pathlib import Path

import jax
import numpy as np
from flax import nnx

import jaxmem
from jaxmem.head.maths.random_streams import Stream

SEED, COUNT = 7, 24

# Where generators are made without naming a stream: initial weights, a split that
# depends on no seed, and the number of a further attempt.
ELSEWHERE = {
    ("train/program.py", "key"),
    ("data/block_files.py", "default_rng"),
    ("train/jobs/rollout/samples.py", "SeedSequence"),
    ("train/jobs/rollout/engine_source.py", "SeedSequence"),
}


def _bits(key):
    return tuple(jax.random.key_data(key).tolist())


def _weights_keys():
    rngs = nnx.Rngs(jax.random.key(SEED))
    made = [rngs.params() for _ in range(COUNT)]
    return {_bits(key) for key in (*made, *(s for k in made for s in _split(k)))}


@jax.jit
@jax.vmap
def _drawn(value):
    """A stream's own key, those of steps, and those of rows of steps."""
    key = functools.partial(Stream.key, types.SimpleNamespace(value=value), SEED)
    steps = jax.numpy.arange(COUNT)
    of_rows = jax.vmap(lambda k: jax.vmap(lambda i: jax.random.fold_in(k, i))(steps))
    return key(), jax.vmap(key)(steps), of_rows(jax.vmap(key)(steps))


def _split(key):
    return jax.random.split(key, 4)


def test_keys_of_streams_and_weights_differ():
    weights = _weights_keys()
    seeds = {_bits(jax.random.fold_in(jax.random.key(SEED), n)) for n in range(COUNT)}
    assert seeds <= weights  # why each stream has a constant
    kept = [weights]
    drawn = _drawn(np.array([*Stream], np.uint32))
    for keys in zip(*map(jax.random.key_data, drawn), strict=True):
        rows = np.concatenate([np.asarray(x).reshape(-1, 2) for x in keys])
        kept.append({tuple(row) for row in rows.tolist()})
        assert len(kept[-1]) == COUNT * (COUNT + 1) + 1
    first = next(iter(Stream))
    assert _bits(first.key(SEED)) in kept[1]
    assert not any(a & b for a, b in itertools.combinations(kept, 2))


def test_generators_of_streams_differ():
    # A trailing zero is not seen by numpy: [7, 1] and [7, 1, 0] give the same numbers.
    numbers = [(SEED, 1), (SEED, 2), (SEED, 1, 1), (1, SEED)]
    drawn = {
        tuple(stream.generator(*n).integers(2**63, size=2).tolist())
        for stream in Stream
        for n in numbers
    }
    assert len(drawn) == len(Stream) * len(numbers)
    assert len({stream.value for stream in Stream}) == len(Stream)


def test_jobs_draw_from_named_streams_only():
    root, found = Path(jaxmem.__file__).parent, set()
    for package in ("data", "train", "generate", "score", "evaluate"):
        for path in (root / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    names = r"random.key random.PRNGKey default_rng SeedSequence Random"
                    if called.endswith(tuple(names.split())):
                        place = path.relative_to(root).as_posix()
                        found.add((place, called.rpartition(".")[2]))
    assert found == ELSEWHERE
