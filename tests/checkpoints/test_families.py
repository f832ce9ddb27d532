"""Every family against transformers: logits, gradients, tokens, packing, and back.

families/ holds what make_families.py recorded, and the settings from which the weights
are drawn again. With a directory in the variable EXPORTS, what is saved stays there,
for make_families.py --exports to compare.
"""

import functools
import json
import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx, traverse_util

from jaxmem import checkpoints
from jaxmem.base.fields import values_of
from jaxmem.checkpoints import names
from jaxmem.checkpoints.families import FAMILIES
from jaxmem.models import balance
from tests.checkpoints import family_table
from tests.helpers import seeded
from tests.helpers.cases import full, slow
from tests.helpers.records import RECORDED, forward, record

pytestmark = pytest.mark.usefixtures("quick_compilation")

# What a cache has to know: windows, learned positions, sinks, states of other mixers.
CACHED = (
    "llama4", "gpt2", "gpt_oss", "deepseek_v3", "qwen3_5", "gemma4_reuse",
    "phi3_passing",
)  # fmt: skip
# Parts with derivatives of their own: of experts and their routers, of attention with
# sinks, of norms and activations. test_delta has the delta rule's.
DIFFERENTIATED = "gpt_oss", "phimoe", "apertus"
# With those and tiny/ they have every switch but relu; others combine and vary them.
OTHERS = (
    "ministral3_window", "llama_dynamic_beyond", "llama4", "gpt2", "cohere2", "granite",
    "qwen2_moe_few", "qwen3_5", "olmo3_yarn", "gpt_neox", "nanochat", "gemma4_experts",
)  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    @functools.cache
    def write(name):
        return seeded.write(record(name), tmp_path_factory.mktemp(name) / name)

    return write


@pytest.fixture(scope="module")
def loaded(written):
    @functools.cache
    def load(name):
        directory = written(name)
        return checkpoints.load(directory), checkpoints.read_config(directory)

    return load


@functools.partial(jax.jit, static_argnums=(0, 3))
def of_rows(definition, weights, tokens, differentiated):
    """Logits, and gradients of the mean cross-entropy of the next tokens.

    The documents are packed into one row: below, prompts have rows of their own.
    """
    rows, length = tokens.shape
    places = jnp.tile(jnp.arange(length), rows)[None]
    documents = jnp.repeat(jnp.arange(1, rows + 1), length)[None]

    def loss(weights):
        decoder = nnx.merge(definition, weights)
        logits = forward(decoder, tokens.reshape(1, -1), documents, places)
        logits = logits.reshape(rows, length, -1)
        entropy = optax.softmax_cross_entropy_with_integer_labels
        return entropy(logits[:, :-1], tokens[:, 1:]).mean(), logits

    if not differentiated:
        return loss(weights)[1], None
    gradients, logits = jax.grad(loss, has_aux=True)(weights)
    return logits, gradients


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "differentiated"),
    [
        *((name, False) for name in OTHERS),
        *(
            (name, True) if name in DIFFERENTIATED else slow(name, True)
            for name in RECORDED
        ),
    ],
)
def test_logits_and_gradients_equal_transformers(name, differentiated, loaded):
    stored, (decoder, config) = record(name), loaded(name)
    tokens = jnp.asarray(stored["tokens"], jnp.int32)
    # A tied weight is once in what is split.
    logits, gradients = of_rows(*nnx.split(decoder), tokens, differentiated)
    scale = np.abs(stored["logits"]).max()
    got = np.asarray(logits)[:, stored["places"]]
    np.testing.assert_allclose(got, stored["logits"], rtol=0, atol=1e-5 * scale)
    if differentiated:
        compare_gradients(gradients, stored, "gradients", config)


def compare_gradients(gradients, stored, kind, config):
    """With recorded ones, in the checkpoint's layout, which this tests too."""
    weights = nnx.to_pure_dict(gradients)
    flat: Any = traverse_util.flatten_dict(weights, sep="/")
    wanted = json.loads(str(stored["tensors"]))
    naming = names.Naming(config.family, config.model, present=wanted)
    made = dict(names.tensors_of(flat, naming, "float32"))
    assert set(wanted) <= set(made)
    largest = stored[kind][:, 0].max()
    for tensor, (norm, projection) in zip(wanted, stored[kind], strict=True):
        allowed = 1e-4 * norm + 1e-7 * largest
        ours = seeded.summary(tensor, made[tensor])
        size = np.sqrt(made[tensor].size)
        assert abs(ours[0] - norm) <= allowed, tensor
        assert abs(ours[1] - projection) <= 3 * allowed + 1e-6 * size * norm, tensor


BALANCED = [name for name in RECORDED if "balance" in record(name)]


@pytest.mark.slow
@pytest.mark.parametrize("name", BALANCED)
def test_router_loss_equals_transformers(name, loaded):
    stored, (_, config) = record(name), loaded(name)
    decoder = checkpoints.load(config.path.parent, router_aux_loss_coef=1.0)
    tokens = jnp.asarray(stored["tokens"], jnp.int32)
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    documents = jnp.ones_like(tokens).at[-1, -6:].set(0)  # padding

    k, (definition, weights) = decoder.config.experts.per_token, nnx.split(decoder)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(weights):
        _, routed = nnx.merge(definition, weights).routed(tokens, documents, places)
        return balance.loss(routed, k), routed

    (loss, routed), gradients = run(weights)
    counts = np.asarray(routed.counts).sum(axis=1)
    assert set(counts) <= {0, k * (tokens.size - 6)}
    if decoder.config.router.correction:  # transformers counts without it
        return
    np.testing.assert_allclose(loss, stored["balance"], rtol=1e-5)
    compare_gradients(gradients, stored, "balance_gradients", config)


@pytest.mark.full
@pytest.mark.parametrize("name", [n if n in CACHED else slow(n) for n in RECORDED])
def test_greedy_tokens_are_those_of_transformers(name, loaded):
    stored, (decoder, _) = record(name), loaded(name)
    new = stored["greedy"].shape[1]
    prompts = jnp.asarray(stored["tokens"][:, :7], jnp.int32)

    @jax.jit
    def first(decoder):
        hidden, cache = decoder.prefill(prompts, np.full(2, 7), 7 + new)
        return jnp.argmax(decoder.logits(hidden), axis=-1), cache

    @jax.jit
    def following(decoder, token, cache):
        hidden, cache = decoder.decode(token, cache)
        return jnp.argmax(decoder.logits(hidden), axis=-1), cache

    token, cache = first(decoder)
    made = [token]
    while len(made) < new:
        token, cache = following(decoder, token, cache)
        made.append(token)
    np.testing.assert_array_equal(np.stack(made, axis=1), stored["greedy"])


def with_new_tensors(recorded):
    """Each name; full are those whose tensors have the names of earlier ones'.

    Their config.json alone differs, which another test writes back.
    """
    known: dict[str, set[str]] = {}
    for name in recorded:
        config, names = (
            json.loads(str(record(name)[x])) for x in ("config", "tensors")
        )
        tensors = {re.sub(r"\d+", "N", x) for x in names}
        family = known.setdefault(config["model_type"], set())
        yield name if tensors - family else full(name)
        family |= tensors


@pytest.mark.parametrize("name", [*with_new_tensors(RECORDED)])
def test_save_writes_what_was_read(name, loaded, tmp_path):
    decoder, config = loaded(name)
    kept = os.environ.get("EXPORTS")
    target = (pathlib.Path(kept) if kept else tmp_path) / name
    checkpoints.save(target, decoder, like=config.path.parent)
    again = checkpoints.load(target)
    old, new = (nnx.to_pure_dict(nnx.state(x)) for x in (decoder, again))
    jax.tree.map(np.testing.assert_array_equal, old, new)


@pytest.mark.parametrize("name", RECORDED)
def test_family_writes_its_config_back(name, written, tmp_path):
    config = checkpoints.read_config(written(name))
    raw = config.family.write(config.model, config.max_positions)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    again = checkpoints.read_config(tmp_path)
    kinds = [
        (model.pattern * model.layers)[: model.layers]
        for model in (config.model, again.model)
    ]
    assert kinds[0] == kinds[1] and again.max_positions == config.max_positions
    # Rows of special tokens are not among what `write` describes.
    same = {"pattern", "pad_row"}
    expected = values_of(config.model)
    changed = {
        key: (value, expected[key])
        for key, value in values_of(again.model).items()
        if key not in same and value != expected[key]
    }
    assert all(np.isclose(*both, rtol=1e-12) for both in changed.values()), changed


def test_longrope_wavelengths_by_document_length(loaded):
    decoder, config = loaded("phi3_long")
    assert config.model.rope.limit == 32
    rng, places = np.random.default_rng(0), np.r_[:40, :8]
    tokens = np.tile(rng.integers(3, seeded.VOCABULARY, 48), (3, 1))
    tokens[2, :8] = tokens[0, 40:]
    ids = np.repeat([[1, 2], [1, 0], [1, 0]], [40, 8], axis=1)
    ids[2, 8:] = 0
    given = tokens, ids, np.array([places, places, np.r_[:8, :40]])
    made = jax.jit(forward)(decoder, *map(jnp.asarray, given))
    np.testing.assert_allclose(made[0, :40], made[1, :40], atol=1e-5)
    np.testing.assert_allclose(made[0, 40:], made[2, :8], atol=1e-5)
    with pytest.raises(ValueError, match="segment_ids must be given with model.rope.l"):
        decoder(given[0], None, given[2])


def test_unread_keys_and_values_are_left_out(loaded, tmp_path):
    decoder, config = loaded("gemma4_reuse")
    target = tmp_path / "more"
    checkpoints.save(target, decoder, like=config.path.parent)
    tensors = safetensors.numpy.load_file(target / "model.safetensors")
    tensors["model.layers.4.self_attn.k_proj.weight"] = np.zeros((32, 64), np.float32)
    safetensors.numpy.save_file(tensors, target / "model.safetensors")
    with pytest.warns(UserWarning, match="their own; jaxmem leaves out 1 such tensors"):
        checkpoints.load(target)


def test_layers_of_further_tokens_are_left_out(loaded, tmp_path):
    decoder, config = loaded("glm4_moe")
    target = tmp_path / "more"
    checkpoints.save(target, decoder, like=config.path.parent)
    tensors = safetensors.numpy.load_file(target / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    safetensors.numpy.save_file(tensors, target / "model.safetensors")
    with pytest.warns(UserWarning, match="leaves out their 1 tensors"):
        checkpoints.load(target)
    tensors["model.layers.2.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    safetensors.numpy.save_file(tensors, target / "model.safetensors")
    with pytest.raises(checkpoints.CheckpointError, match="layers.2.eh_proj.weight is"):
        checkpoints.load(target)


def test_families_are_recorded():
    texts = {json.loads(str(record(name)["config"]))["model_type"] for name in RECORDED}
    assert texts == {family.model_type for family in FAMILIES}


def test_page_has_every_family():
    page = pathlib.Path(__file__).parents[2] / "docs" / "families.md"
    text = page.read_text("utf-8")
    assert "\n".join(family_table.rows()) in text
    measured = [*family_table.measured()]
    assert "\n".join(measured) in text and len(measured) == len(FAMILIES)
