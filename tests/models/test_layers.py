"""A block against float64 and against its ordinary form, and what it keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util

from jaxmem import remat
from jaxmem.models import layers
from jaxmem.models.decoder import Decoder, ModelConfig
from jaxmem.models.positions import Rotation, Sight, rope_frequencies, rope_tables
from jaxmem.remat import cost
from tests.helpers.cases import one_at_a_time, slow

SIZES = ModelConfig(
    layers=2, hidden=64, ff=96, heads=4, kv_heads=2, head_dim=16, vocab_size=61
)
GEMMA = {
    "mlp.activation": "gelu",
    "norm.post": True,
    "norm.offset": True,
    "embedding.scaled": True,
}
ARCHITECTURES = {
    "Llama": {"rope.scaling": "llama3", "rope.factor": 8.0, "rope.original_length": 16},
    "Qwen2": {"self_attn.qkv_bias": True},
    "Qwen3": {"qk_norm.enabled": True},
    "Mistral": {"pattern": ("local",), "self_attn.window": 5},
    "Gemma 2": {
        "pattern": ("local", "global"),
        "self_attn.window": 5,
        "self_attn.softcap": 2.0,
        "self_attn.scale": 0.4,
        **GEMMA,
    },
    "Gemma 3": {
        "pattern": ("local", "global"),
        "self_attn.window": 5,
        "qk_norm.enabled": True,
        "rope.local_theta": 50.0,
        **GEMMA,
    },
}
BATCH, LENGTH = 2, 24

pytestmark = pytest.mark.usefixtures("quick_compilation")


def config_of(name, **changes):
    return SIZES.replaced(ARCHITECTURES[name] | changes)


# ------------------------------------------------------------ the ordinary block


def ordinary(config, w, x, segment_ids, positions):
    """The block as most code has it: wide statistics, and whatever autodiff keeps.

    It is computed in the type of x; in float64 it is the oracle.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def norm(x, name):
        scale = w[f"{name}/scale"].astype(wide) + config.norm.offset
        mean = jnp.mean(jnp.square(x.astype(wide)), -1, keepdims=True)
        return (x * jax.lax.rsqrt(mean + config.norm.eps) * scale).astype(x.dtype)

    def linear(x, name):
        bias = w.get(f"{name}/bias", jnp.zeros((), x.dtype))
        made = x @ w[f"{name}/kernel"].astype(x.dtype) + bias.astype(x.dtype)
        if f"{name}/lora_a" not in w:
            return made
        A, B = (w[f"{name}/lora_{which}"].astype(x.dtype) for which in "ab")
        return made + (x @ A) * (config.lora_alpha / config.lora_rank) @ B

    def post(x, name):
        return norm(x, name) if config.norm.post else x

    def rotated(x):
        angles = positions[..., None, None] * frequencies
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        a, b = jnp.split(x.astype(wide), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    frequencies = rope_frequencies(config, config.pattern[0]).astype(wide)
    x_norm = norm(x, "attention_norm")
    q, k, v = (
        linear(x_norm, f"attention/{name}").reshape(*x.shape[:2], -1, config.head_dim)
        for name in ("query", "key", "value")
    )
    if config.qk_norm.enabled:
        q, k = norm(q, "attention/query_norm"), norm(k, "attention/key_norm")
    q, k = (rotated(each).astype(x.dtype) for each in (q, k))
    k, v = (jnp.repeat(each, config.heads // config.kv_heads, 2) for each in (k, v))
    scores = jnp.einsum("bqhd,bthd->bhqt", q, k, preferred_element_type=wide)
    scores = scores * config.score_scale
    if config.self_attn.softcap is not None:
        cap = config.self_attn.softcap
        scores = cap * jnp.tanh(scores / cap)
    ago = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    seen = (ago >= 0) & (ago < (config.self_attn.window or LENGTH))
    seen = seen & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(x.dtype)
    mixed = jnp.einsum("bhqt,bthd->bqhd", weights, v).reshape(*x.shape[:2], -1)
    x = x + post(linear(mixed, "attention/output"), "post_attention_norm")
    x_norm = norm(x, "feed_forward_norm")
    act = {"silu": jax.nn.silu, "gelu": jax.nn.gelu}[config.mlp.activation]
    gate = act(linear(x_norm, "feed_forward/gate"))
    made = linear(gate * linear(x_norm, "feed_forward/up"), "feed_forward/down")
    return x + post(made, "post_feed_forward_norm")


# --------------------------------------------------------------------- numbers


def problem(config):
    """Weights by name, a block's input, the cotangent of its result; documents."""
    rng = np.random.default_rng(0)
    shapes = nnx.eval_shape(lambda: layers.TransformerBlock(config, rngs=nnx.Rngs(0)))
    flat = traverse_util.flatten_dict(nnx.to_pure_dict(nnx.split(shapes)[1]), sep="/")

    def draw(name, shape):
        one = 0.0 if config.norm.offset or "scale" not in name else 1.0
        size = shape[0] ** -0.5 if len(shape) == 2 else 0.3
        return jnp.asarray(one + size * rng.normal(size=shape), jnp.bfloat16)

    weights = {name: draw(name, leaf.shape) for name, leaf in flat.items()}
    x, dy = (
        jnp.asarray(rng.normal(size=(BATCH, LENGTH, config.hidden)), jnp.bfloat16)
        for _ in range(2)
    )
    segment_ids = np.repeat([[1, 2, 3], [1, 1, 2]], LENGTH // 3, axis=1)
    starts = np.where(np.diff(segment_ids, prepend=0, axis=1), np.arange(LENGTH), 0)
    positions = np.arange(LENGTH) - np.maximum.accumulate(starts, axis=1)
    return weights, x, dy, segment_ids.astype(np.int32), positions.astype(np.int32)


def lean(config, w, x, segment_ids, positions):
    nested = traverse_util.unflatten_dict(dict(w), sep="/")
    block = nnx.merge(definition_of(config), nested)
    sight = Sight(segment_ids, config.self_attn.window)
    tables = rope_tables(positions, rope_frequencies(config, config.pattern[0]))
    return block.read(x, sight, tables)[0]


@functools.cache
def definition_of(config):
    shapes = nnx.eval_shape(lambda: layers.TransformerBlock(config, rngs=nnx.Rngs(0)))
    return nnx.split(shapes)[0]


def with_gradients(block, config, dtype, weights, x, dy, *rest):
    """Result and gradients, {name: float64}, of a block computed in `dtype`."""

    @jax.jit
    def run(w, x, dy):
        y, pull = jax.vjp(lambda w, x: block(config, w, x, *rest), w, x)
        dw, dx = pull(dy)
        return {"y": y, "dx": dx, **dw}

    made = run(*jax.tree.map(lambda a: a.astype(dtype), (weights, x, dy)))
    return {name: np.asarray(a, np.float64) for name, a in made.items()}


@functools.cache
def exact_of(name):
    config = config_of(name)
    with jax.enable_x64(True):
        return with_gradients(ordinary, config, jnp.float64, *problem(config))


def error(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


# Of the ordinary form's own error, and of epsilon: in bfloat16 what is rounded where is
# the same on every processor; in float32 the order of XLA's sums is the vector width's.
TYPES = {"bfloat16": (1.2, 0.1), "float32": (2.0, 1.0)}
QUICK = ("Gemma 2", "bfloat16")
PAIRS = [
    (name, dtype) if (name, dtype) == QUICK else slow(name, dtype)
    for name in ARCHITECTURES
    for dtype in TYPES
]


@pytest.mark.full
@pytest.mark.parametrize("name, dtype", PAIRS)
def test_block_as_exact_as_ordinary_form(name, dtype):
    """The result and each gradient have no larger error than the ordinary form's."""
    config = config_of(name, dtype=dtype)
    given, want = problem(config), exact_of(name)
    usual = with_gradients(ordinary, config, dtype, *given)
    got = with_gradients(lean, config, dtype, *given)
    assert got.keys() == want.keys()
    unit, (times, more) = float(jnp.finfo(dtype).eps), TYPES[dtype]
    for key, exact in want.items():
        if key.endswith("key/bias"):  # moves all of a query's scores alike
            continue
        bound = times * error(usual[key], exact) + more * unit
        assert error(got[key], exact) <= bound, key
        assert error(got[key], exact) < 8 * unit, key  # both could be wrong


# ------------------------------------------------------------------- residuals


def kept_by(config):
    """Bytes per token and layer of a block without a policy, by the sizes alone."""
    width = config.head_dim
    queries, keys = config.heads * width, config.kv_heads * width
    parts = 2  # attention and feed-forward: each one's input, and the norm's number
    numbers = parts * config.hidden + 2 * config.ff  # gate and up
    numbers += 2 * queries + 2 * keys  # attention's q, out, k, v
    rows = parts + config.heads  # and logsumexps
    if config.qk_norm.enabled:  # q and k before their norms
        numbers, rows = numbers + queries + keys, rows + config.heads + config.kv_heads
    if config.norm.post:
        numbers, rows = numbers + parts * config.hidden, rows + parts
    return jnp.dtype(config.dtype).itemsize * numbers + 4 * rows


def shaped(config, policy="none", rows=BATCH, length=LENGTH):
    """`remat.residuals` of one block of a decoder, which is of either kind."""
    definition, weights = nnx.split(
        nnx.eval_shape(lambda: layers.TransformerBlock(config, rngs=nnx.Rngs(0)))
    )
    struct = jax.ShapeDtypeStruct
    h = struct((rows, length, config.hidden), jnp.dtype(config.dtype))
    table = struct((2, rows, length, 1, config.head_dim // 2), jnp.float32)
    ids, number = struct((rows, length), jnp.int32), struct((), jnp.int32)

    def block(h, weights, cosines, sines, ids, window, kind):
        sight, rope = Sight(ids, window), Rotation(cosines, sines, kind)
        return nnx.merge(definition, weights).read(h, sight, rope)[0]

    block = remat.block(block, policy)
    return remat.residuals(block, h, weights, table, table, ids, number, number)


KEEP_MORE = ["Qwen3", "Gemma 2"]  # than the others: a norm's queries, post norms


@pytest.mark.parametrize(
    "name, dtype",
    [
        *one_at_a_time(KEEP_MORE, ["bfloat16", "float32"]),
        *(slow(x, "bfloat16") for x in ARCHITECTURES if x not in KEEP_MORE),
    ],
)
def test_block_keeps_stated_residuals(name, dtype):
    config = config_of(name, dtype=dtype)
    kept = shaped(config)
    assert kept.bytes_per_token == kept_by(config)
    assert shaped(config, length=2 * LENGTH).bytes_per_token == kept_by(config)
    # In float32, one number per row of a norm and of attention's scores.
    rows = {"attn_lse", "norm_rms"}
    assert {each.name for each in kept if each.dtype != config.dtype} <= rows


@pytest.mark.parametrize("adapted", [False, True], ids=["", "LoRA"])
def test_adapters_keep_nothing_more_of_a_block(adapted):
    changes = dict(lora_rank=4, lora_targets=("query", "output", "gate", "down"))
    config = config_of("Qwen3", dtype="bfloat16", **(changes if adapted else {}))
    assert shaped(config).bytes_per_token == kept_by(config)


@pytest.mark.full
@pytest.mark.parametrize(
    "name, policy",
    [
        ("Gemma 3", "dots_and_attention"), ("Gemma 3", "dots"), ("Qwen3", "none"),
        ("Gemma 3", "none"), ("Gemma 2", "dots_and_attention"),
    ],
)  # fmt: skip
def test_scan_stacks_residuals_of_a_block(name, policy):
    """By the traced gradient of a whole decoder, in which layers are of two kinds."""
    config = config_of(name, dtype="bfloat16", param_dtype="bfloat16", layers=4)
    decoder = nnx.eval_shape(lambda: Decoder(config, policy=policy, rngs=nnx.Rngs(0)))
    definition, weights = nnx.split(decoder)
    ids = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)

    def total(weights, *batch):
        return nnx.merge(definition, weights)(*batch).astype(jnp.float32).sum()

    jaxpr = jax.make_jaxpr(jax.grad(total))(weights, ids, ids, ids)
    scans = [
        equation for equation, _ in cost.equations(jaxpr.jaxpr)
        if equation.primitive.name == "scan"
    ]  # fmt: skip
    stacked = [var.aval.shape for var in scans[0].outvars if len(var.aval.shape) > 2]
    held = sum(
        np.prod(var.aval.shape) * var.aval.dtype.itemsize
        for var in scans[0].outvars
        if var.aval.ndim > 2 and var.aval.shape[:2] == (config.layers, BATCH)
    )
    per_token = held / (config.layers * BATCH * LENGTH)
    assert per_token == shaped(config, policy).bytes_per_token, stacked
