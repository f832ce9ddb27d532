"""Every family here: one recorded configuration of each, on any machine.

    python -m benchmarks.run_families [FAMILY...]

The checkpoints are those of tests/checkpoints: random weights, and what transformers
makes of them. Rows of families that are not named stay as they are. The columns:

    load      largest error of logits, over the largest logit of transformers
    train     loss of the rows after two steps of AdamW, over that before
    sample    share of greedy tokens, with the cache, that are those of transformers
    shard     as load, on a mesh of four devices (fsdp=2, tensor=2)
    plan      MiB of that step as a plan counts them: weights, moments, temporaries
    export    share of weights that are the same bits when saved and read again
    lora      as load, of adapters that are saved in PEFT's layout, read and merged,
              beside those of the decoder that was saved
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import tempfile
import warnings
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import results
from jaxmem import checkpoints
from jaxmem.checkpoints.families import FAMILIES
from jaxmem.data.documents import Batch, DataConfig
from jaxmem.models.config import TARGETS, ModelConfig
from jaxmem.models.decoder import Decoder
from jaxmem.models.lora import adapters_of
from jaxmem.models.partitioning import Layout, MeshConfig
from jaxmem.models.training_head import HeadConfig
from jaxmem.models.weights import join_weights
from jaxmem.planning import accounts
from jaxmem.train.jobs import sft
from jaxmem.train.jobs.config import SftJobConfig
from jaxmem.train.optimizer import OptimizerConfig
from jaxmem.train.settings import RunConfig
from tests.helpers import seeded

NAME, RANK, PROMPT = "families_cpu.csv", 2, 7


def recorded(family: str) -> tuple[str, dict[str, Any]]:
    """The first configuration of a family, and what is recorded of it."""
    for path in sorted(seeded.RECORDS.glob("*.npz")):
        record = dict(np.load(path))
        if json.loads(str(record["config"]))["model_type"] == family:
            return path.stem, record
    raise SystemExit(f"{family}: no such family is recorded")


@jax.jit
def logits(decoder: Decoder, tokens: jax.Array) -> jax.Array:
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return decoder.logits(decoder(tokens, jnp.ones_like(tokens), places))


def error(computed: Any, expected: Any) -> float:
    return float(np.abs(np.asarray(computed) - expected).max() / np.abs(expected).max())


def on_a_mesh(directory: pathlib.Path, tokens: jax.Array) -> np.ndarray:
    """Logits, on devices of which each stores a part of the weights."""
    layout = Layout(MeshConfig(fsdp=2, tensor=2))
    with layout.context():
        definition, state = nnx.split(checkpoints.load(directory))
        weights = nnx.to_pure_dict(state)
        shapes = layout.of_weights(jax.eval_shape(lambda: weights))
        placed = jax.tree.map(
            lambda w, s: jax.device_put(w, s.sharding), weights, shapes
        )
        return np.asarray(logits(nnx.merge(definition, placed), tokens))


def sampled(decoder: Decoder, record: Mapping[str, Any]) -> float:
    """The share of greedy tokens that are those of transformers."""
    expected = record["greedy"]
    rows, new = expected.shape
    prompts = jnp.asarray(record["tokens"][:, :PROMPT], jnp.int32)

    @jax.jit
    def complete(decoder):
        lengths = np.full(rows, PROMPT)
        hidden, cache = decoder.prefill(prompts, lengths, PROMPT + new)

        def one(carried, _):
            hidden, cache = carried
            token = jnp.argmax(decoder.logits(hidden), axis=-1)
            return decoder.decode(token, cache), token

        return jax.lax.scan(one, (hidden, cache), length=new)[1].T

    return float(np.mean(np.asarray(complete(decoder)) == expected))


def trained(directory: pathlib.Path, tokens: np.ndarray) -> tuple[float, float]:
    """The loss after two steps over that before, and a step's MiB by a plan."""
    rows, length = tokens.shape
    config = SftJobConfig(
        model=checkpoints.with_checkpoint(ModelConfig(checkpoint=str(directory))),
        data=DataConfig(batch_size=rows, sequence_length=length),
        head=HeadConfig(chunk=None),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=0),
        run=RunConfig(steps=3),
    )
    program = sft.SftProgram(config, seeded.VOCABULARY)
    labels = np.roll(tokens, -1, axis=1)
    labels[:, -1] = -1
    places = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    batch = Batch(tokens, labels, np.ones_like(tokens), places)
    batch = Batch(*(x[None].astype(np.int32) for x in batch))
    traced = program.trace_step(config.head)
    step = accounts.compile_for(traced)
    account = accounts.of_compiled(step)
    state, losses = program.initial_state(), []
    for _ in range(3):
        state, numbers = step(state, program.frozen(), batch)
        losses.append(float(numbers["loss"]))
    mib = (account.arguments + account.temporary) / 2**20
    return losses[-1] / losses[0], mib


def exported(decoder: Decoder, like: pathlib.Path, out: pathlib.Path) -> float:
    """The share of weights that are the same when saved and read again."""
    checkpoints.save(out, decoder, like=like)
    both = decoder, checkpoints.load(out)
    pairs = zip(*(jax.tree.leaves(nnx.state(x)) for x in both), strict=True)
    return float(np.mean([np.array_equal(*pair) for pair in pairs]))


def adapted(decoder: Decoder, like: pathlib.Path, out: pathlib.Path, tokens) -> float:
    """The error of adapters that were saved, read and merged, with random numbers."""
    targets = []
    for target in TARGETS:
        with contextlib.suppress(ValueError):  # the family has no such matrix
            dataclasses.replace(decoder.config, lora_rank=1, lora_targets=(target,))
            targets.append(target)
    changes = {"lora_rank": RANK, "lora_targets": tuple(targets)}
    config = dataclasses.replace(decoder.config, **changes)
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    definition, shapes = nnx.split(abstract)
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(
        lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype),
        adapters_of(nnx.to_pure_dict(shapes)),
    )
    base = nnx.to_pure_dict(nnx.split(decoder)[1])
    whole = nnx.merge(definition, join_weights(base, adapters))
    expected = np.asarray(logits(whole, tokens))
    with warnings.catch_warnings():  # of PEFT, which does not read them here
        warnings.simplefilter("ignore")
        checkpoints.save_adapter(out, whole, base=str(like))
    merged = checkpoints.merge(checkpoints.load(like, adapter=out))
    # In the decoder without adapters, whose program is there already.
    plain = nnx.merge(nnx.split(decoder)[0], nnx.split(merged)[1])
    return error(logits(plain, tokens), expected)


def row(family: str) -> dict[str, Any]:
    """The record of a family."""
    name, record = recorded(family)
    tokens = jnp.asarray(record["tokens"], jnp.int32)
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        base = seeded.write(record, folder / name)
        decoder = checkpoints.load(base)
        computed = np.asarray(logits(decoder, tokens))
        ratio, mib = trained(base, np.asarray(record["tokens"], np.int32))
        sharded = on_a_mesh(base, tokens)[:, record["places"]]
        return {
            "family": family,
            "configuration": name,
            "load": f"{error(computed[:, record['places']], record['logits']):.1e}",
            "train": round(ratio, 3),
            "sample": sampled(decoder, record),
            "shard": f"{error(sharded, record['logits']):.1e}",
            "plan": round(mib, 3),
            "export": exported(decoder, base, folder / "out"),
            "lora": f"{adapted(decoder, base, folder / 'adapter', tokens):.1e}",
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*")
    named = parser.parse_args().families
    jax.config.update("jax_disable_most_optimizations", True)
    for family in named or sorted(f.model_type for f in FAMILIES):
        found = row(family)
        print(found, flush=True)
        results.merge(NAME, [{**found, **results.provenance()}], ("family",))


if __name__ == "__main__":
    main()
