"""Matrices as codes in a decoder, against the decoder of what they decode to."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util
from jax.sharding import PartitionSpec as P

from jaxmem import remat
from jaxmem.models import (
    coded_linear,
    coded_weights,
    embedding,
    partitioning,
    sampling,
    weights,
)
from jaxmem.models.config import BASE_TARGETS, PLAIN
from jaxmem.models.decoder import Decoder, ModelConfig
from tests.helpers import decoders
from tests.helpers.codes import decode, encode

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = ModelConfig(
    layers=2, hidden=128, ff=192, heads=4, kv_heads=2, head_dim=32, vocab_size=40,
    lora_rank=4, lora_targets=("query", "down"), base="nf4",
)  # fmt: skip
IDS = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 8)))


def coded(config, **options):
    """A decoder with codes of the matrices of `decoders.drawn`."""
    plain = decoders.drawn(dataclasses.replace(config, **PLAIN), **options)
    flat = weights.by_path(plain)
    arrays = {}
    for path, array in flat.items():
        module, _, kind = path.rpartition("/")
        name = module.rpartition("/")[2]
        if kind == "kernel" and name in BASE_TARGETS and config.base_of(name):
            encoded = encode(array.swapaxes(-1, -2), config.base)
            arrays |= {f"{path}_{name}": each for name, each in encoded.items()}
        elif path == "embed/embedding" and config.codes_embedding:
            encoded = encode(array, "int8", block=config.hidden)
            arrays |= {f"{path}_{name}": each for name, each in encoded.items()}
        else:
            arrays[path] = array
    shapes = nnx.eval_shape(lambda: Decoder(config, **options, rngs=nnx.Rngs(0)))
    nested = traverse_util.unflatten_dict(arrays, sep="/")
    return nnx.merge(nnx.split(shapes)[0], nested)


def decoded(decoder, **options):
    """The dense decoder of a coded one."""
    config = dataclasses.replace(decoder.config, **PLAIN)
    shapes = nnx.eval_shape(lambda: Decoder(config, **options, rngs=nnx.Rngs(0)))
    flat, arrays = weights.by_path(decoder), {}
    for path in weights.by_path(shapes):
        if path in flat:
            arrays[path] = flat[path]
            continue
        parts = {
            name: flat[f"{path}_{name}"]
            for name in coded_weights.ARRAYS if f"{path}_{name}" in flat
        }  # fmt: skip
        W = decode(parts, config.dtype)
        arrays[path] = W if path.endswith("embedding") else W.swapaxes(-1, -2)
    nested = traverse_util.unflatten_dict(arrays, sep="/")
    return nnx.merge(nnx.split(shapes)[0], nested)


EXPERTS = CONFIG.replaced(
    {
        "feed_forwards": ("experts",),
        "experts.count": 4,
        "experts.per_token": 2,
        "experts.ff": 64,
        "experts.shared_ff": 64,
        "experts.bias": True,
    }
)
ALL = ("query", "key", "value", "output", "gate", "up", "down", "embedding")
TABLE = dataclasses.replace(CONFIG, tied=False, base_targets=ALL)
LATENT = CONFIG.replaced(
    {
        "mixers": ("latent",),
        "latent.kv_rank": 64,
        "latent.query_rank": 64,
        "latent.rope_head_dim": 16,
        "lora_targets": ("output", "up"),
    }
)
FULL = pytest.mark.full
LAST = remat.Policy(dots=True, last=1)


@pytest.mark.parametrize(
    "config, options",
    [
        (CONFIG, {}),
        pytest.param(dataclasses.replace(CONFIG, base="int8"), {}, marks=FULL),
        pytest.param(CONFIG, {"policy": None}, marks=FULL),
        pytest.param(CONFIG, {"policy": LAST}, marks=FULL),
        pytest.param(CONFIG, {"unroll": True}, marks=FULL),
        pytest.param(EXPERTS, {}, marks=FULL),
        pytest.param(LATENT, {}, marks=FULL),
        pytest.param(TABLE, {}, marks=FULL),
    ],
)
def test_decoder_with_codes_is_the_dense_one(config, options):
    model = coded(config, **options)
    dense = decoded(model, **options)

    @jax.jit
    def gradients(model):
        definition, state = nnx.split(model)
        trained, frozen = weights.split_weights(
            nnx.to_pure_dict(state), "(^|/)lora_[ab]$|norm/scale$"
        )

        def loss(trained):
            model = nnx.merge(definition, weights.join_weights(trained, frozen))
            return jnp.sum(decoders.whole(model, IDS) ** 3)

        return jax.value_and_grad(loss)(trained)

    expected, own = gradients(dense), gradients(model)

    def compare(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * float(jnp.abs(a).max()))

    jax.tree.map(compare, expected, own)


@FULL
def test_sample_decodes_once_or_in_each_step():
    model = coded(EXPERTS)
    made = []
    for once in (False, True):
        config = sampling.SamplingConfig(max_new_tokens=5, decode_base=once)
        lengths, key = jnp.array([8, 5]), jax.random.key(0)
        ends = {"config": config, "eos_id": 39, "pad_id": 0}
        sample = jax.jit(functools.partial(sampling.sample, **ends))
        made.append(sample(model, IDS, lengths, key))
    np.testing.assert_array_equal(made[0].tokens, made[1].tokens)
    np.testing.assert_allclose(made[0].logprobs, made[1].logprobs, atol=1e-4)
    blocks = weights.by_path(sampling.prepared(model, True))
    assert not any(p.startswith("blocks") and p.endswith("codes") for p in blocks)


@FULL
def test_new_decoder_has_the_codes_of_the_dense_one():
    def make(config):
        return jax.jit(lambda: Decoder(config, rngs=nnx.Rngs(0)))()

    new = weights.by_path(make(CONFIG))
    dense = weights.by_path(make(dataclasses.replace(CONFIG, base=None)))
    kernel = dense["blocks/feed_forward/up/kernel"].swapaxes(-1, -2)
    for name, array in encode(kernel, "nf4").items():
        other = new[f"blocks/feed_forward/up/kernel_{name}"]
        np.testing.assert_allclose(other, array, atol=1e-6)
    assert not any(p.startswith("blocks") and p.endswith("kernel") for p in new)


def test_base_targets_are_the_matrices_with_codes():
    config = dataclasses.replace(CONFIG, base_targets=("query", "up"))
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    paths = [path for path in weights.by_path(model) if path.endswith("_codes")]
    assert sorted(paths) == [
        "blocks/attention/query/kernel_codes", "blocks/feed_forward/up/kernel_codes",
    ]  # fmt: skip


def test_base_plain_matrices_have_no_codes_in_their_layers():
    config = dataclasses.replace(CONFIG, layers=4, base_plain=("1.down", "1.query"))
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    flat = weights.by_path(model)
    coded = {path.rpartition("/")[0] for path in flat if path.endswith("_codes")}
    for stack, layers in (("blocks", 1), ("blocks_1", 1), ("blocks_2", 2)):
        for module in ("attention/query", "attention/key", "feed_forward/down"):
            path = f"{stack}/{module}"
            plain = stack == "blocks_1" and not module.endswith("key")
            assert (path in coded) is not plain
            assert (f"{path}/kernel" in flat) is plain
            assert len(flat[f"{path}/kernel" + "_codes" * (not plain)]) == layers


def test_base_double_false_has_scales_in_float32():
    config = dataclasses.replace(CONFIG, base_double=False)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    flat = weights.by_path(model)
    scales = flat["blocks/feed_forward/down/kernel_scales"]
    assert (scales.shape, scales.dtype) == ((2, 128, 3), jnp.float32)
    assert not any("scale_scales" in path or "scale_offset" in path for path in flat)


@pytest.mark.parametrize("policy", [None, remat.Policy(dots=True)])
def test_block_keeps_no_decoded_matrix(policy):
    arrays = coded_weights.shapes(192, 128, "nf4")
    x = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)

    def block(x, arrays):
        return x + jnp.sin(coded_linear.product(x, arrays))[:, :128]

    stored = remat.residuals(remat.block(block, policy), x, arrays)
    sizes = {entry.shape for entry in stored}
    assert (192, 128) not in sizes and (128, 192) not in sizes


def _equations(traced):
    """The equations of a jaxpr and of those that it calls, without loops' bodies."""
    for equation in traced.jaxpr.eqns:
        if equation.primitive.name == "jit":
            yield from _equations(equation.params["jaxpr"])
        else:
            yield equation


@pytest.mark.parametrize("policy", [None, "full"])
def test_scan_keeps_no_decoded_matrix(policy):
    config = dataclasses.replace(CONFIG, layers=6)
    model = nnx.eval_shape(lambda: Decoder(config, policy=policy, rngs=nnx.Rngs(0)))
    definition, state = nnx.split(model)
    trained, frozen = jax.eval_shape(
        lambda x: weights.split_weights(x, "lora_"), nnx.to_pure_dict(state)
    )

    def loss(trained, frozen):
        model = nnx.merge(definition, weights.join_weights(trained, frozen))
        return jnp.sum(decoders.whole(model, IDS))

    traced = jax.make_jaxpr(jax.grad(loss))(trained, frozen)
    # Nothing of a matrix's size is computed before a loop, either.
    largest = max(
        [math.prod(v.aval.shape) for e in _equations(traced) for v in e.outvars]
    )
    assert largest < 128 * 192
    jaxpr = str(traced)
    widths = (128, 64, 192)
    kinds = [f"{t}[6,{a},{b}]" for t in ("f32", "bf16") for a in widths for b in widths]
    assert "u8[6,192,64]" in jaxpr and not any(kind in jaxpr for kind in kinds)


def test_cast_weights_leaves_codes_and_scales():
    arrays = {"up": {"kernel_codes": jnp.ones(2, jnp.uint8), "bias": jnp.ones(2)}}
    arrays["up"]["kernel_scale_scales"] = jnp.ones(2)
    cast = weights.cast_weights(arrays, "bfloat16")["up"]
    types = {name: str(array.dtype) for name, array in cast.items()}
    assert types == {
        "kernel_codes": "uint8", "bias": "bfloat16", "kernel_scale_scales": "float32",
    }  # fmt: skip


def test_split_weights_refuses_codes():
    flat = {"up": {"kernel_codes": jnp.ones(2, jnp.uint8)}, "norm": jnp.ones(2)}
    for trainable in (None, "up/kernel"):
        with pytest.raises(ValueError, match="up/kernel_codes, a matrix that model.ba"):
            weights.split_weights(flat, trainable)


def test_layout_shards_codes_as_their_kernel():
    model = nnx.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0)))
    flat = weights.by_path(model)
    for path, leaf in flat.items():
        if not path.endswith("kernel_codes"):
            continue
        spec = partitioning._weight_spec(path, leaf.shape)
        kernel = partitioning._weight_spec(path.removesuffix("_codes"), leaf.shape)
        assert spec == P(kernel[0], kernel[2], kernel[1]) and any(spec)
        scales = f"{path.removesuffix('codes')}scales"
        assert partitioning._weight_spec(scales, flat[scales].shape) == spec
    row = partitioning._weight_spec("blocks/attention/query/kernel_scales", (2, 8, 1))
    assert row == P(None, "tensor", None)
    name = "blocks/attention/query/kernel_scale_scales"
    assert partitioning._weight_spec(name, (2, 3)) == P()


def test_config_refuses_a_matrix_without_whole_blocks():
    config = dataclasses.replace(CONFIG, ff=160)
    with pytest.raises(ValueError, match="divide the 160 inputs of 'down'"):
        nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def test_config_refuses_base_targets_without_base():
    with pytest.raises(ValueError, match="base_targets .*left out without base"):
        dataclasses.replace(CONFIG, base=None, base_targets=("query",))
    with pytest.raises(ValueError, match="base_targets must be among query"):
        dataclasses.replace(CONFIG, base_targets=("queries",))
    with pytest.raises(ValueError, match="base_plain .*left out without base"):
        dataclasses.replace(CONFIG, base=None, base_plain=("0.down",))
    for entry in ("02.down", "down", "0.downs"):
        with pytest.raises(ValueError, match="base_plain must be of LAYER.MATRIX, as "):
            dataclasses.replace(CONFIG, base_plain=(entry,))
    with pytest.raises(ValueError, match="base_double must be True without base='nf4'"):
        dataclasses.replace(CONFIG, base="int8", base_double=False)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (
            {"base_targets": ("query", "latent")},
            "base_targets has 'latent', but no layer",
        ),
        ({"base_plain": ("2.down",)}, "base_plain has '2.down', a matrix that layer 2"),
        (
            {"base_plain": ("1.latent",)},
            "base_plain has '1.latent', .*layers have query",
        ),
        (
            {"base_targets": ("up",), "base_plain": ("0.up", "1.up")},
            "base_targets has 'u",
        ),
        ({"base_targets": ()}, "model.base='nf4' codes no matrix"),
    ],
)
def test_decoder_refuses_targets_without_a_matrix(fields, match):
    config = dataclasses.replace(CONFIG, **fields)
    with pytest.raises(ValueError, match=match):
        nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def test_config_takes_layers_that_a_checkpoint_may_have():
    plain = ("31.down",)
    config = ModelConfig(checkpoint="x", lora_rank=1, base="nf4", base_plain=plain)
    assert config.plain_matrices(31) == {"down"}


def test_config_refuses_codes_of_a_tied_embedding():
    with pytest.raises(ValueError, match="without 'embedding' if it is tied"):
        dataclasses.replace(TABLE, tied=True)
    with pytest.raises(ValueError, match="without 'embedding' if lora_saved"):
        dataclasses.replace(TABLE, lora_saved=("embed",))


def test_look_up_of_codes_is_of_the_decoded_table():
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(40, 128)), jnp.float32)
    coded = nnx.eval_shape(lambda: embedding.CodedTable(40, TABLE, nnx.Rngs(0)))
    arrays = encode(table, "int8", block=128)
    assert arrays["scales"].shape == (40, 1)
    coded.set_arrays(arrays)
    rows = embedding.rows(coded, IDS, None)
    whole = decode(arrays, "float32")
    np.testing.assert_array_equal(rows, whole[IDS])
    assert 0 < np.abs(whole - table).max() < 0.02


@pytest.mark.parametrize("targets, gib", [(None, 5.7), (ALL, 5.1)])
def test_weights_of_qwen3_8b_take_so_many_gib(targets, gib):
    config = ModelConfig().replaced(
        {
            "layers": 36,
            "hidden": 4096,
            "ff": 12288,
            "heads": 32,
            "kv_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
            "tied": False,
            "qk_norm.enabled": True,
            "dtype": "bfloat16",
            "param_dtype": "bfloat16",
            "base": "nf4",
            "base_targets": targets,
        }
    )
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    leaves = weights.by_path(model).items()
    size = sum(leaf.size * leaf.dtype.itemsize for _, leaf in leaves)
    assert size <= gib * 2**30
    count = sum(coded_weights.count_weights(*item) for item in leaves)
    assert abs(count - 8.19e9) < 1e7
