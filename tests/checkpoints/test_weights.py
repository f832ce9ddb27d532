"""Real layouts in and out: torch's numbers, sharded files, places, and what is wrong.

tiny/ holds random checkpoints that transformers saved, with the logits that torch gave
in float64; make_tiny.py made them.
"""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from jaxmem import checkpoints
from jaxmem.checkpoints import CheckpointError, directories
from jaxmem.checkpoints.families import ropes
from jaxmem.checkpoints.tensors import Tensors, whole
from jaxmem.models.training_head import HeadConfig
from tests.helpers import seeded
from tests.helpers.cases import full, slow
from tests.helpers.decoders import whole as hidden_states
from tests.helpers.texts import MISTRAL_3, NESTED, QWEN3_5_MOE

TINY = pathlib.Path(__file__).parent / "tiny"
NAMES = sorted(path.name for path in TINY.iterdir())
QUICK, FULL = ("gemma2", "qwen3"), ("gemma3_images", "llama_linear")
pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.filterwarnings("ignore:.*only the text part"),
]


@functools.cache
def expected(name):
    return np.load(TINY / name / "expected.npz")


@functools.cache
def loaded(name, dtype="float32"):
    return checkpoints.load(TINY / name, dtype=dtype, param_dtype="float32")


def logits_of(decoder, tokens):
    return np.asarray(decoder.logits(hidden_states(decoder, jnp.asarray(tokens))))


TABLE = "model.embed_tokens.weight"


def copied(name, tmp_path):
    return pathlib.Path(shutil.copytree(TINY / name, tmp_path / name))


def scores(logits, labels):
    """Log-probabilities of labels, and entropies."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    picked = np.take_along_axis(logp, labels[..., None], axis=-1)[..., 0]
    return picked, -(np.exp(logp) * logp).sum(axis=-1)


# ------------------------------------------------------------------ numbers


def test_every_architecture_has_a_checkpoint():
    from jaxmem.checkpoints.families import FAMILIES, WITH_IMAGES

    configs = [(TINY / name / "config.json").read_text() for name in NAMES]
    records = seeded.RECORDS.glob("*.npz")  # of test_families.py
    configs += [str(np.load(path)["config"]) for path in records]
    here = {json.loads(config)["architectures"][0] for config in configs}
    nested = MISTRAL_3, QWEN3_5_MOE, *NESTED.values()  # of test_text_parts.py
    here |= {config["architectures"][0] for config in nested}
    assert here == {each.architecture for each in (*FAMILIES, *WITH_IMAGES)}


@pytest.mark.parametrize(
    "name",
    [*QUICK, *map(full, FULL), *(slow(n) for n in NAMES if n not in QUICK + FULL)],
)
def test_numbers_are_torchs(name):
    logits, tokens = expected(name)["logits"], expected(name)["tokens"]
    scale = np.abs(logits).max()
    decoder = loaded(name)
    np.testing.assert_allclose(logits_of(decoder, tokens), logits, atol=1e-4 * scale)
    # And without logits: what a trainer reads.
    labels = np.roll(tokens, -1, axis=1)
    stats = decoder.head.token_stats(
        hidden_states(decoder, jnp.asarray(tokens)), labels
    )
    picked, entropy = scores(logits, labels)
    np.testing.assert_allclose(stats.logprob, picked, atol=2e-4 * scale)
    np.testing.assert_allclose(stats.entropy, entropy, atol=4e-4 * scale)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "llama", "qwen2"])
def test_cached_tokens_equal_torch(name):
    logits, tokens = expected(name)["logits"], jnp.asarray(expected(name)["tokens"])
    decoder = loaded(name)
    lengths = jnp.array([4, 7])
    prefill = jax.jit(lambda decoder, prompts: decoder.prefill(prompts, lengths, 12))
    decode = jax.jit(lambda decoder, token, cache: decoder.decode(token, cache))
    hidden, cache = prefill(decoder, tokens[:, :7])
    rows = np.arange(2)
    for step in range(4):
        place = np.asarray(lengths) - 1 + step
        got = decoder.logits(hidden)
        np.testing.assert_allclose(got, logits[rows, place], atol=2e-4)
        hidden, cache = decode(decoder, tokens[rows, place + 1], cache)


def rms(x):
    return float(np.sqrt(np.mean(np.square(x))))


@pytest.mark.parametrize("name", ["gemma2", slow("qwen3")])
def test_bfloat16_as_near_as_materialised_path(name):
    """Errors of log-probabilities and entropies, against torch's in float64."""
    stored = expected(name)
    labels = np.roll(stored["tokens"], -1, axis=1)
    decoder = checkpoints.load(TINY / name)  # in the checkpoint's own type
    assert (decoder.config.dtype, decoder.config.param_dtype) == ("bfloat16",) * 2
    hidden = hidden_states(decoder, jnp.asarray(stored["tokens"]))
    assert hidden.dtype == jnp.bfloat16
    stats = decoder.head.token_stats(hidden, labels)
    logits = np.asarray(decoder.logits(hidden), np.float64)
    noise = 2**-20 * np.abs(logits).max()  # of float32 sums
    for fused, materialised, right in zip(
        (stats.logprob, stats.entropy),
        scores(logits, labels),
        scores(stored["logits"], labels),
        strict=True,
    ):
        # Of the same hidden states: the head without logits loses nothing more.
        allowed = np.abs(materialised - right).max()
        assert 1e-3 < allowed
        assert np.abs(fused - right).max() <= 1.001 * allowed + noise
        assert rms(fused - right) <= 1.001 * rms(materialised - right) + noise


@pytest.mark.slow
def test_bfloat16_decoder_rounds_as_little_as_torch():
    """Over four architectures: 24 tokens of one alone vary by a fifth with rounding."""
    ratios = []
    for name in ("gemma2", "gemma3", "mistral", "qwen3"):
        stored = expected(name)
        decoder = checkpoints.load(TINY / name)
        hidden = hidden_states(decoder, jnp.asarray(stored["tokens"]))
        error = rms(np.asarray(decoder.logits(hidden), np.float64) - stored["logits"])
        ratios.append(error / rms(stored["bfloat16"] - stored["logits"]))
    assert rms(ratios) <= 1, ratios


# ---------------------------------------------------------------- in and out


@pytest.mark.parametrize("name", [n for n in NAMES if n != "gemma3_images"])
def test_saving_gives_the_same_files_back(name, tmp_path):
    decoder = checkpoints.load(TINY / name)
    checkpoints.save(tmp_path / "out", decoder, like=TINY / name)
    before = {}
    for file in TINY.joinpath(name).glob("*.safetensors"):
        before |= load_file(file)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert (after[key].dtype, after[key].shape) == (tensor.dtype, tensor.shape)
        np.testing.assert_array_equal(after[key], tensor)
    theirs, ours = (
        json.loads((d / "config.json").read_text())
        for d in (TINY / name, tmp_path / "out")
    )
    assert ours == ropes.in_both(theirs)


def test_shards_and_their_index(tmp_path):
    decoder = loaded("qwen3")
    out = tmp_path / "deeper" / "out"
    checkpoints.save(
        out, decoder, like=TINY / "qwen3", dtype="float32", max_shard_bytes=9_000
    )
    text = (out / "model.safetensors.index.json").read_text()
    index = json.loads(text)
    assert text == json.dumps(index, indent=2)  # one tensor a line, as others write it
    files = set(index["weight_map"].values())
    assert len(files) > 3
    assert {path.name for path in out.glob("*")} == files | {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
    }
    again = checkpoints.load(out)
    assert again.config == decoder.config  # float32 both, as config.json now says
    jax.tree.map(np.testing.assert_array_equal, *map(nnx.state, (again, decoder)))


def test_save_copies_tokenizer_files_but_no_pickles(tmp_path):
    source = copied("llama", tmp_path)
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"no")
    checkpoints.save(tmp_path / "out", loaded("llama"), like=source)
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }


def test_save_copies_named_templates_unless_one_is_given(tmp_path):
    source, decoder = copied("llama", tmp_path), loaded("llama")
    (source / directories.TEMPLATES).mkdir()
    (source / directories.TEMPLATES / "tool_use.jinja").write_text("tools")
    out = tmp_path / "out"
    for _ in range(2):  # what was copied is replaced
        checkpoints.save(out, decoder, like=source, overwrite=True)
        (template,) = directories.named_templates(out)
        assert template.name == "tool_use.jinja" and template.read_text() == "tools"
    (own := tmp_path / "own.jinja").write_text("own")
    checkpoints.save(out, decoder, like=source, overwrite=True, chat_template=own)
    assert (out / "chat_template.jinja").read_text() == "own"
    assert not directories.named_templates(out)
    (mine := out / directories.TEMPLATES / "mine.txt").parent.mkdir()
    mine.touch()
    with pytest.raises(CheckpointError, match="mine.txt is not a file of a checkpoint"):
        checkpoints.save(out, decoder, like=source, overwrite=True)


def test_save_replaces_directory_only_if_asked(tmp_path):
    checkpoints.save(tmp_path / "out", loaded("llama"), like=TINY / "llama")
    with pytest.raises(CheckpointError, match="out exists already; name another"):
        checkpoints.save(tmp_path / "out", loaded("llama"), like=TINY / "llama")
    stale = tmp_path / "out" / "model-00002-of-00002.safetensors"
    stale.touch()
    mine = tmp_path / "out" / "mine.py"
    mine.touch()
    save = functools.partial(checkpoints.save, like=TINY / "llama", overwrite=True)
    with pytest.raises(
        CheckpointError, match="out/mine.py is not a file of a checkpoint"
    ):
        save(tmp_path / "out", loaded("llama"))
    assert mine.exists() and stale.exists()
    mine.unlink()
    save(tmp_path / "out", loaded("llama"))
    assert {p.name for p in tmp_path.iterdir()} == {"out"}
    assert not stale.exists()


def test_save_refuses_model_unlike_reference(tmp_path):
    with pytest.raises(CheckpointError, match="qk_norm.enabled=False, not True"):
        checkpoints.save(tmp_path / "out", loaded("llama"), like=TINY / "qwen3")
    assert not list(tmp_path.iterdir())


def test_weights_go_straight_to_a_mesh():
    auto = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=auto)
    asked = []

    def place(path, shape):
        asked.append((path, shape))
        wide = path.endswith("kernel") and shape[-1] % 2 == 0
        axes = (*([None] * (len(shape) - 1)), "tensor") if wide else ()
        return NamedSharding(mesh, PartitionSpec(*axes))

    decoder = checkpoints.load(TINY / "qwen3", dtype="float32", sharding=place)
    query = decoder.blocks.attention.query.kernel[...]
    assert ("blocks/attention/query/kernel", (3, 16, 32)) in asked
    assert query.sharding.spec == PartitionSpec(None, None, "tensor")
    assert {s.data.shape for s in query.addressable_shards} == {(3, 16, 16)}
    tokens = expected("qwen3")["tokens"]
    np.testing.assert_allclose(
        logits_of(decoder, tokens), expected("qwen3")["logits"], atol=2e-4
    )


def test_load_with_one_sharding_and_options():
    mesh = jax.make_mesh((4,), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec())
    head = HeadConfig(chunk=8)
    decoder = checkpoints.load(
        TINY / "llama", sharding=sharding, head=head, policy="none", attention="xla"
    )
    assert decoder.embed.embedding[...].sharding == sharding
    assert (decoder.head.chunk, decoder.policy) == (8, "none")


# -------------------------------------------------------------- what is wrong


def test_truncated_shard_names_first_lost_tensor(tmp_path):
    source = copied("mistral", tmp_path)
    shard = source / "model-00002-of-00003.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    lost = f"{shard.name}: cut short at .* bytes: tensor model.layers.* and 0 more"
    with pytest.raises(CheckpointError, match=lost):
        checkpoints.load(source)
    shard.write_bytes(content[:20])
    with pytest.raises(CheckpointError, match=f"{shard.name}: .*header is cut short"):
        checkpoints.load(source)
    shard.write_bytes(content[:8] + b"?" * (len(content) - 8))
    with pytest.raises(CheckpointError, match=f"{shard.name}: .*header cannot be read"):
        checkpoints.load(source)
    shard.unlink()
    with pytest.raises(
        CheckpointError,
        match=f"{shard.name} is missing; .* names it as the file of model",
    ):
        checkpoints.load(source)


def change(source, **tensors):
    """Replace tensors, or remove those that are None."""
    file = source / "model.safetensors"
    old = load_file(file)
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        if tensor is None:
            del old[name]
        else:
            old[name] = tensor
    save_file(old, file)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"model__layers__1__mlp__up_proj__weight": None},
            "model.safetensors: tensor model.layers.1.mlp.up_proj.weight is missing",
        ),
        (
            {"model__norm__weight": np.ones(17, np.float32)},
            r"tensor model.norm.weight must have shape \(16,\), .* got \(17,\)",
        ),
        (
            {"model__norm__weight": np.ones(16, np.int8)},
            "tensor model.norm.weight is of type I8; only F64, F32",
        ),
        (
            {"model__layers__3__mlp__up_proj__weight": np.ones(2, np.float32)},
            "tensor model.layers.3.mlp.up_proj.weight is not part of the model",
        ),
    ],
)
def test_wrong_tensors_are_named_with_their_file(tensors, message, tmp_path):
    source = copied("llama", tmp_path)
    change(source, **tensors)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(source)


def test_derivable_tensors_may_be_present(tmp_path):
    source = copied("llama_linear", tmp_path)
    extra = {
        "model__layers__0__self_attn__rotary_emb__inv_freq": np.ones(2, np.float32)
    }
    embedding = np.asarray(checkpoints.load(source).embed.embedding[...])
    change(source, lm_head__weight=embedding, **extra)
    np.testing.assert_array_equal(
        checkpoints.load(source).embed.embedding[...],
        checkpoints.load(TINY / "llama_linear").embed.embedding[...],
    )


def test_stored_head_unlike_tied_table_is_refused(tmp_path):
    source = copied("llama_linear", tmp_path)
    table = np.array(load_file(source / "model.safetensors")[TABLE])
    table[-1, -1] += 1
    change(source, lm_head__weight=table)
    with pytest.raises(
        CheckpointError, match=f"lm_head.weight is not a copy of {TABLE}"
    ):
        checkpoints.load(source)


def test_whole_file_precedes_index_of_others(tmp_path):
    source = copied("llama", tmp_path)
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {TABLE: "model-00001-of-00002.sa"}}))
    with pytest.warns(
        UserWarning, match="model.safetensors: jaxmem reads this file only"
    ):
        again = checkpoints.load(source)
    expected = checkpoints.load(TINY / "llama")
    jax.tree.map(
        np.testing.assert_array_equal, *map(jax.tree.leaves, (again, expected))
    )
    # An index that names the file says where all tensors are.
    index.write_text(json.dumps({"weight_map": {TABLE: "model.safetensors"}}))
    with pytest.raises(
        CheckpointError, match="is missing from this file .1 tensors are there"
    ):
        checkpoints.load(source)


def test_missing_and_pickled_weights_are_refused(tmp_path):
    source = copied("llama", tmp_path)
    (source / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match="model.safetensors and .* are both missing"
    ):
        checkpoints.load(source)
    (source / "pytorch_model.bin").touch()
    with pytest.raises(
        CheckpointError, match="does not read pytorch_model.bin, because"
    ):
        checkpoints.load(source)
    (source / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="index.json: not an index of safetens"):
        checkpoints.load(source)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (
            {"a": "../x.safetensors"},
            "tensor a is in '../x.safetensors', which is outsi",
        ),
        ({"a": "/x.safetensors"}, "tensor a is in '/x.safetensors', which is outside"),
        ({"a": "b/../../x.safetensors"}, "tensor a is in 'b/../../x.safetensors', whi"),
        ({"a": 5}, "tensor a must have the name of a file, got 5"),
        ({"a": ["x"]}, r"tensor a must have the name of a file, got \['x'\]"),
        ({}, "not an index of safetensors: weight_map must name .*got {}"),
        (["a"], r"not an index of safetensors: weight_map must name .*got \['a'\]"),
        (
            {"a": "gone"},
            "gone is missing; model.safetensors.index.json names it as the file of a",
        ),
        (
            {"a": "x" * 5000},
            "xxx.* is missing; model.safetensors.index.json names it as the file of a",
        ),
        (
            {"a\n" * 5000: 5},
            r"tensor 'a\\na.*a\\n' must have the name of a file, got 5",
        ),
    ],
)
def test_index_may_not_name_files_elsewhere(weight_map, message, tmp_path):
    (tmp_path / "x.safetensors").touch()
    inside = tmp_path / "inside"
    inside.mkdir()
    index = inside / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message) as raised:
        Tensors(inside)
    assert len(str(raised.value)) < 800 and "\n" not in str(raised.value)


def test_links_in_the_directory_are_followed(tmp_path):
    source = copied("mistral", tmp_path)
    shard = source / "model-00002-of-00003.safetensors"
    shard.rename(tmp_path / "blob")
    shard.symlink_to("../blob")  # as in a cache of the Hub
    np.testing.assert_array_equal(
        checkpoints.load(source).embed.embedding[...],
        checkpoints.load(TINY / "mistral").embed.embedding[...],
    )


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": {"data_offsets": ["0", "10"]}}, "damaged: its header cannot be read"),
        ({"a": {"data_offsets": []}}, "damaged: its header cannot be read"),
        (["a"], "damaged: its header cannot be read"),
        ("x" * 10_000, "damaged: its header cannot be read"),
    ],
)
def test_headers_that_are_none(header, message, tmp_path):
    data = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data)
    with pytest.raises(CheckpointError, match=message) as raised:
        Tensors(tmp_path)
    assert len(str(raised.value)) < 600


def test_directory_named_as_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(
        CheckpointError, match="model.safetensors: cannot be read: Is a"
    ):
        Tensors(tmp_path)


def test_unsupported_weight_type_is_named(tmp_path):
    source = copied("llama", tmp_path)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": "float8_e4m3"}))
    with pytest.raises(
        CheckpointError, match="config.json: dtype 'float8_e4m3' is not one of"
    ):
        checkpoints.load(source, dtype="float32")
    checkpoints.load(source, dtype="float32", param_dtype="float32")


def test_tensors_unlike_config_json_are_refused(tmp_path):
    source = copied("llama", tmp_path)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"vocab_size": 41}))
    message = r"embed_tokens.weight must have shape \(41, 16\), .* got \(40, 16\)"
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(source)
    assert dataclasses.is_dataclass(checkpoints.read_config(source))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other memory than numpy's")
def test_offloaded_layer_is_read_on_cpu():
    weight = jnp.arange(24.0).reshape(3, 2, 4)
    layer = whole(weight, 1)
    np.testing.assert_array_equal(layer, np.arange(8.0, 16).reshape(2, 4))
    assert np.shares_memory(layer, whole(weight, None))
