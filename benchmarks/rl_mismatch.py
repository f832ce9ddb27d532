"""Log-probabilities of trainers against those of the sampler.

heads: one engine samples from the exact distribution, in float64, of bfloat16 hidden
states and weights; a head computes the same tokens' log-probabilities from the same
numbers. Heads are jaxmem's; logits in float32; logits stored in bfloat16 with a softmax
in float32; and log-probabilities of the last one stored in bfloat16. Logits are normal
with a standard deviation of 1 (flat), 3 (policy) or 8 (peaked). Rows have errors in
nats, and percentages of tokens and sequences that corrections drop.

routes: a bfloat16 mixture of experts samples completions and records which experts each
token goes to. Trainers with the same weights, in bfloat16 and in float32, measure the
log-probabilities of its tokens in whole rows, with experts of their own routers or with
the recorded ones. Weights are random, the head's scaled so that logits have a standard
deviation of about 3.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxmem
from jaxmem import losses
from jaxmem.models import sampling
from jaxmem.models.decoder import Decoder, ModelConfig

D, V = 128, 16384
SPREADS = {"flat": 1.0, "policy": 3.0, "peaked": 8.0}
BANDS = {"strict": (0.999, 1.002), "1_01": (0.99, 1.01), "icepop": (0.5, 5.0)}
STATISTICS = ("geometric_mean", "every_token")
EXPERTS = ModelConfig().replaced(
    {
        "layers": 8,
        "hidden": 128,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "vocab_size": 4096,
        "feed_forwards": ("experts",),
        "experts.count": 32,
        "experts.per_token": 4,
        "experts.ff": 64,
        "router.renormalised": True,
        "tied": False,
        "dtype": "bfloat16",
    }
)
PROMPT = 16  # tokens


# ------------------------------------------------------------------------- heads


def fused(h, W, y):
    return jaxmem.logprobs(h, W, y, chunk=256)


def materialised(h, W, y, round_logits=lambda z: z, round_logprobs=lambda lp: lp):
    """A softmax of logits in float32, of which one or both are rounded."""

    def part(rows):
        h, y = rows
        z = round_logits(jnp.matmul(h, W.T, preferred_element_type=jnp.float32))
        return jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], 1)[:, 0]

    parts = jax.lax.map(part, (h.reshape(-1, 256, h.shape[1]), y.reshape(-1, 256)))
    return round_logprobs(parts.ravel())


def in_bfloat16(x):
    """x rounded; a conversion there and back may be compiled away."""
    return jax.lax.reduce_precision(x, 8, 7)


HEADS = {
    "jaxmem": fused,
    "float32 logits": materialised,
    "bfloat16 logits": lambda *a: materialised(*a, in_bfloat16),
    "bfloat16 log-probs": lambda *a: materialised(*a, in_bfloat16, in_bfloat16),
}


def heads(sequences, length) -> Iterator[dict]:
    """A row for each kind of data and head."""
    for data, spread in SPREADS.items():
        h, W, y, exact = problem(spread, sequences * length)
        for head, logprobs in HEADS.items():
            measured = np.asarray(jax.jit(logprobs)(h, W, y))
            yield {
                "data": data, "spread": spread, "head": head, "sequences": sequences,
                "length": length, "d": D, "v": V,
                **rejected(measured, exact, sequences),
            }  # fmt: skip


def problem(spread, tokens):
    """Hidden states, weights, tokens drawn from them, and exact log-probabilities."""
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.standard_normal((tokens, D)), jnp.bfloat16)
    W = rng.standard_normal((V, D)) * (spread / D**0.5)
    W = jnp.asarray(W, jnp.bfloat16)
    exact_h, exact_W = (np.asarray(x.astype(jnp.float32), np.float64) for x in (h, W))
    labels, logprobs = np.empty(tokens, np.int32), np.empty(tokens)
    for start in range(0, tokens, 512):
        rows = slice(start, start + 512)
        z = exact_h[rows] @ exact_W.T
        z -= z.max(1, keepdims=True)
        labels[rows] = (z + rng.gumbel(size=z.shape)).argmax(1)
        label_logits = np.take_along_axis(z, labels[rows, None], 1)[:, 0]
        logprobs[rows] = label_logits - np.log(np.exp(z).sum(1))
    return h, W, jnp.asarray(labels), logprobs


def rejected(measured, exact, sequences) -> dict[str, str]:
    """Errors in nats, and percentages of tokens and sequences that are dropped."""
    error = np.abs(measured - exact)
    row = {"mean_error": f"{error.mean():.2e}", "max_error": f"{error.max():.2e}"}
    shape = sequences, -1
    both = measured.reshape(shape), exact.reshape(shape).astype(np.float32)
    for name, (low, high) in BANDS.items():
        weights = losses.icepop_weights(*both, low=low, high=high)
        row[f"tokens_outside_{name}"] = f"{100 * float((weights == 0).mean()):.3f}"
    ids = np.ones(both[0].shape, int)
    for name in STATISTICS:
        weights = losses.sequence_mask_weights(*both, ids, statistic=name)
        dropped = float((weights == 0).all(1).mean())
        row[f"sequences_dropped_{name}"] = f"{100 * dropped:.1f}"
    return row


# ------------------------------------------------------------------------ routes


def routes(rows, tokens) -> Iterator[dict]:
    """A row for each type of the trainer, with its own routes and with replayed."""
    state = nnx.to_pure_dict(nnx.split(Decoder(EXPERTS, rngs=nnx.Rngs(0)))[1])
    state["head"]["kernel"] *= 3
    ids, logprobs, recorded = sampled(decoder("bfloat16", state), rows, tokens)
    for dtype in ("bfloat16", "float32"):
        run = functools.partial(trained, decoder(dtype, state), ids)
        own = np.asarray(run(None)[1])
        for replays in (False, True):
            measured, _ = run(recorded if replays else None)
            taken = recorded if replays else own
            yield {
                "trainer": dtype, "replays": replays, "rows": rows, "tokens": tokens,
                **compared(measured, logprobs, taken, recorded),
            }  # fmt: skip


def decoder(dtype, state):
    """A decoder of these weights that computes in `dtype`."""
    config = dataclasses.replace(EXPERTS, dtype=dtype)
    abstract = nnx.eval_shape(lambda: Decoder(config, policy=None, rngs=nnx.Rngs(0)))
    definition, shapes = nnx.split(abstract)
    nnx.replace_by_pure_dict(shapes, state)
    return nnx.merge(definition, shapes)


def sampled(model, rows, tokens):
    """Ids [B, T], log-probabilities of those after the prompts, and routes."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, EXPERTS.vocab_size or 0, (rows, PROMPT), np.int32)
    config = sampling.SamplingConfig(max_new_tokens=tokens)

    @jax.jit
    def draw(model, key):
        sampler = sampling.Sampler(config, (), 0, records=True)
        return sampler.complete(model, prompts, jnp.full(rows, PROMPT), key)

    samples = jax.device_get(draw(model, jax.random.key(0)))
    ids = np.concatenate([prompts, samples.tokens], axis=1)
    return ids, samples.logprobs, samples.routes[:, : PROMPT + tokens - 1]


@jax.jit
def trained(model, ids, routes):
    """Log-probabilities [B, R] of what follows prompts, and the experts of tokens."""
    read, labels = ids[:, :-1], ids[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(read.shape[1]), read.shape)
    hidden = model(read, None, positions, None, routes)
    logprobs = model.head.logprobs(hidden, labels)[:, PROMPT - 1 :]
    lengths = jnp.full(len(read), read.shape[1])
    _, cache = model.prefill(read, lengths, read.shape[1], records=True)
    return logprobs, cache.routes


def compared(measured, sampler, own, recorded) -> dict[str, str]:
    """Columns: distances in nats, percentages of ratios, and of other experts."""
    report = jaxmem.mismatch_report(measured, sampler)
    others = (own[..., None, :] != recorded[..., None]).all(-1)
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
