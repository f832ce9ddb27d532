"""Log-probabilities of a mixture of experts with and without its sampler's routes.

    python -m benchmarks.run_routes

A sampler in bfloat16 completes prompts, token by token, and records which experts each
token goes to. Trainers with the same weights, in bfloat16 and in float32, then measure
the log-probabilities of its tokens in whole rows: with experts of their own routers, or
with the recorded ones. Weights are random, in float32; the head's are scaled so that
logits have a standard deviation of about 3.
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxmem
from benchmarks import results
from jaxmem.models import sampling
from jaxmem.models.decoder import Decoder, ModelConfig

SIZES = ModelConfig(
    layers=8, hidden=128, heads=4, kv_heads=2, head_dim=32, vocab_size=4096,
    feed_forwards=("experts",), experts=32, experts_per_token=4, expert_ff=64,
    router_renormalised=True, tied=False, dtype="bfloat16",
)  # fmt: skip
ROWS, PROMPT, TOKENS = 64, 16, 96


def weights():
    """Of all decoders."""
    state = nnx.to_pure_dict(nnx.split(Decoder(SIZES, rngs=nnx.Rngs(0)))[1])
    state["head"]["kernel"] *= 3
    return state


def decoder(dtype, state):
    """With the same weights, in another type."""
    sizes = dataclasses.replace(SIZES, dtype=dtype)
    abstract = nnx.eval_shape(lambda: Decoder(sizes, policy=None, rngs=nnx.Rngs(0)))
    definition, shapes = nnx.split(abstract)
    nnx.replace_by_pure_dict(shapes, state)
    return nnx.merge(definition, shapes)


def sampled(model, rows, tokens):
    """Tokens [B, T], log-probabilities of those after prompts, and routes."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, SIZES.vocab_size or 0, (rows, PROMPT), np.int32)
    config = sampling.SamplingConfig(max_new_tokens=tokens)

    @jax.jit
    def draw(model, key):
        lengths = jnp.full(rows, PROMPT)
        sampler = sampling.Sampler(config, (), 0, records=True)
        return sampler.complete(model, prompts, lengths, key)

    samples = jax.device_get(draw(model, jax.random.key(0)))
    whole = np.concatenate([prompts, samples.tokens], axis=1)
    return whole, samples.logprobs, samples.routes[:, : PROMPT + tokens - 1]


@jax.jit
def measured(model, whole, routes):
    """Log-probabilities [B, R] of what follows prompts, and the experts of tokens."""
    read, labels = whole[:, :-1], whole[:, 1:]
    places = jnp.broadcast_to(jnp.arange(read.shape[1]), read.shape)
    hidden = model(read, None, places, None, routes)
    logprobs = model.head.logprobs(hidden, labels)[:, PROMPT - 1 :]
    lengths = jnp.full(len(read), read.shape[1])
    _, cache = model.prefill(read, lengths, read.shape[1], records=True)
    return logprobs, cache.routes


def compared(got, want, own, routes) -> dict[str, str]:
    """Columns: distances in nats, percentages of ratios, and of other experts."""
    report = jaxmem.mismatch_report(got, want)
    others = (own[..., None, :] != routes[..., None]).all(-1)
    percent = {
        "outside_strict": 1 - report.inside_strict,
        "outside_1_01": 1 - report.inside_1_01,
        "outside_1_25": report.outside_1_25,
        "choices_rerouted": others.mean(),
        "tokens_rerouted": others.any((-1, -2)).mean(),
    }
    nats = {
        name: f"{float(getattr(report, name)):.2e}" for name in ("mean", "p99", "max")
    }
    return nats | {name: f"{100 * float(x):.2f}" for name, x in percent.items()}


def measure(rows=ROWS, tokens=TOKENS):
    state = weights()
    whole, logprobs, routes = sampled(decoder("bfloat16", state), rows, tokens)
    found = []
    for dtype in ("bfloat16", "float32"):
        run = functools.partial(measured, decoder(dtype, state), whole)
        own = np.asarray(run(None)[1])
        for replays in (False, True):
            got, _ = run(routes if replays else None)
            taken = routes if replays else own
            found.append(
                {"trainer": dtype, "replays": replays, "rows": rows, "tokens": tokens,
                 **compared(got, logprobs, taken, routes)}
            )  # fmt: skip
    return found


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # takes none
    rows = measure()
    for row in rows:
        print(row)
    print("wrote", results.write("routes_cpu.csv", rows))
