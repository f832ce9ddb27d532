"""Checkpoints that bitsandbytes coded: their numbers, parts, and what is wrong.

make_bitsandbytes.py made bitsandbytes/, with logits of the decoded weights in float64.
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
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxmem import checkpoints
from jaxmem.checkpoints import CheckpointError
from jaxmem.checkpoints.bitsandbytes import CodedTensors
from jaxmem.models import coded_weights, structure
from jaxmem.models.coded_weights import DYNAMIC, NF4
from jaxmem.models.config import ModelConfig
from jaxmem.models.weights import by_path
from tests.helpers import texts
from tests.helpers.cases import slow
from tests.helpers.decoders import whole as hidden_states

CODED = pathlib.Path(__file__).parent / "bitsandbytes"
KINDS = {"llama_double": "nf4", "qwen3_nf4": "nf4", "qwen3_int8": "int8"}
CODED_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
STRIDE = 37  # of weights that are recorded
GATE = "model.layers.1.mlp.gate_proj.weight"
STATE = ".quant_state.bitsandbytes__nf4"
pytestmark = pytest.mark.usefixtures("quick_compilation")


@functools.cache
def expected(name):
    return np.load(CODED / name / "expected.npz")


@functools.cache
def loaded(name, **options):
    return checkpoints.load(CODED / name, **options)


def logits_of(decoder, tokens):
    return np.asarray(decoder.logits(hidden_states(decoder, jnp.asarray(tokens))))


def matrix_of(decoder, name):
    """A matrix [outputs, inputs] of a layer, decoded, by its name in the files."""
    _, _, layer, module, part, _ = name.split(".")
    block = {"self_attn": "attention", "mlp": "feed_forward"}[module]
    known = {"q": "query", "k": "key", "v": "value", "o": "output"}
    part = part.removesuffix("_proj")
    stacks = structure.stacks(decoder.config).values()
    (stack,) = (stack for stack in stacks if int(layer) in stack.layers)
    start = f"{stack.name}/{block}/{known.get(part) or part}/kernel"
    weights, index = by_path(decoder), stack.layers.index(int(layer))
    if start in weights:
        return np.asarray(weights[start][index].T, np.float32)
    names = coded_weights.ARRAYS
    paths = {name: f"{start}_{name}" for name in names if f"{start}_{name}" in weights}
    arrays = {name: weights[path][index] for name, path in paths.items()}
    return np.asarray(coded_weights.decode(arrays, jnp.float32))


def copied(name, tmp_path):
    return pathlib.Path(shutil.copytree(CODED / name, tmp_path / name))


def changed(directory, change):
    """The directory, after a function has changed its tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize("options", [{}, {"base": None}])
@pytest.mark.parametrize("name", KINDS)
def test_load_has_the_matrices_of_bitsandbytes(name, options):
    """Equal within the one rounding to bfloat16, which is theirs."""
    decoder = loaded(name, **options)
    recorded = {k: v for k, v in expected(name).items() if k.endswith(".weight")}
    assert len(recorded) == {"qwen3_nf4": 12, "qwen3_int8": 7}.get(name, 14)
    for tensor, right in recorded.items():
        weights = matrix_of(decoder, tensor).flatten()[::STRIDE]
        np.testing.assert_allclose(weights, right, rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", ["llama_double", slow("qwen3_nf4"), "qwen3_int8"])
def test_load_logits_are_those_of_decoded_weights(name):
    logits, tokens = expected(name)["logits"], expected(name)["tokens"]
    plain = loaded(name, dtype="float32", base=None)
    made, scale = logits_of(plain, tokens), np.abs(logits).max()
    np.testing.assert_allclose(made, logits, atol=1e-5 * scale)
    # In codes, which float32 products do not round to bfloat16.
    exact = loaded(name, dtype="float32", param_dtype="float32", base=None)
    coded = logits_of(loaded(name, dtype="float32"), tokens)
    np.testing.assert_allclose(coded, logits_of(exact, tokens), atol=1e-5 * scale)
    np.testing.assert_allclose(coded, logits, atol=2**-6 * scale)


def test_load_keeps_what_is_coded():
    decoder = loaded("qwen3_nf4")
    config, weights = decoder.config, by_path(decoder)
    targets = "query", "value", "output", "gate", "up", "down"
    assert (config.base, config.base_targets) == ("nf4", targets)
    assert not config.base_double and not config.base_plain
    kinds = {path: str(weights[path].dtype) for path in weights if "attention/" in path}
    assert kinds["blocks/attention/key/kernel"] == "bfloat16"
    assert kinds["blocks/attention/value/kernel_codes"] == "uint8"
    assert kinds["blocks/attention/value/kernel_scales"] == "float32"
    double = by_path(loaded("llama_double"))
    assert double["blocks/feed_forward/up/kernel_scales"].dtype == "uint8"
    assert double["blocks/feed_forward/up/kernel_scale_scales"].shape == (2, 2)


@pytest.mark.parametrize("name", KINDS)
def test_load_places_parts_of_codes(name):
    devices = np.array(jax.devices()[:2])
    mesh = jax.sharding.Mesh(devices, ("x",), axis_types=(AxisType.Auto,))

    def place(path, shape):
        axes: list[str | None] = [None] * len(shape)
        if path.endswith(("_codes", "_scales")) and "scale_" not in path:
            by_inputs = "down" in path and shape[-1] % 2 == 0
            axes[2 if by_inputs else 1] = "x"
        return NamedSharding(mesh, PartitionSpec(*axes))

    parts = by_path(loaded(name, sharding=place))
    for path, whole in by_path(loaded(name)).items():
        np.testing.assert_array_equal(parts[path], whole)
        assert not path.endswith("_codes") or not parts[path].is_fully_replicated


@pytest.mark.parametrize("name", KINDS)
def test_coded_tensors_read_parts_as_the_whole(name):
    tensors = CodedTensors(CODED / name, KINDS[name])
    wide = 320 if name == "llama_double" else 64
    for part, shape in (("gate", (wide, 64)), ("down", (64, wide))):
        matrix = f"model.layers.0.mlp.{part}_proj.weight"
        every = tensors.read(matrix, shape, (slice(None), slice(None)))
        assert every.shape == shape and every.dtype == np.float32
        for rows, columns in ((slice(0, 8), slice(None)), (slice(24, 64), slice(3, 9))):
            part = tensors.read(matrix, shape, (rows, columns))
            np.testing.assert_array_equal(part, every[rows, columns])


def test_tables_are_those_of_bitsandbytes():
    path = CODED / "llama_double" / "model.safetensors"
    with safe_open(path, framework="np") as file:
        for end, table in (("quant_map", NF4), ("nested_quant_map", DYNAMIC)):
            stored = file.get_tensor(f"{GATE}.{end}")
            np.testing.assert_array_equal(stored, table)


@pytest.mark.parametrize("storage", ["bfloat16", "float32"])
def test_codes_of_other_storage_types_are_the_same_bytes(storage, tmp_path):
    def change(tensors):
        for name in [name for name in tensors if name + STATE in tensors]:
            codes = tensors[name].reshape(-1).view(jnp.dtype(storage))
            tensors[name] = codes.reshape(-1, 1)

    directory = changed(copied("qwen3_nf4", tmp_path), change)
    made, right = checkpoints.load(directory), loaded("qwen3_nf4")
    np.testing.assert_array_equal(matrix_of(made, GATE), matrix_of(right, GATE))


def test_matrix_may_be_plain_in_one_layer(tmp_path):
    tensors = CodedTensors(CODED / "qwen3_nf4", "nf4")
    plain = tensors.read(GATE, (64, 64), (slice(None), slice(None)))

    def change(tensors):
        for name in [name for name in tensors if name.startswith(GATE)]:
            del tensors[name]
        tensors[GATE] = plain.astype(jnp.bfloat16)

    made = checkpoints.load(changed(copied("qwen3_nf4", tmp_path), change))
    assert made.config.base_plain == ("1.gate",)
    weights = by_path(made)
    assert "blocks/feed_forward/gate/kernel_codes" in weights
    assert "blocks_1/feed_forward/gate/kernel" in weights
    for layer in ("0", "1"):
        name = GATE.replace(".1.", f".{layer}.")
        right = matrix_of(loaded("qwen3_nf4"), name)
        np.testing.assert_allclose(matrix_of(made, name), right, rtol=2**-8)
    tokens = expected("qwen3_nf4")["tokens"]
    logits = logits_of(loaded("qwen3_nf4"), tokens)
    scale = np.abs(logits).max()
    np.testing.assert_allclose(logits_of(made, tokens), logits, atol=2**-5 * scale)


def test_saved_checkpoint_is_plain(tmp_path):
    source = CODED / "qwen3_nf4"
    right = loaded("qwen3_nf4", base=None)
    checkpoints.save(tmp_path / "out", right, like=source)
    assert checkpoints.read_config(tmp_path / "out").coding is None
    made = checkpoints.load(tmp_path / "out")
    np.testing.assert_array_equal(matrix_of(made, GATE), matrix_of(right, GATE))


# ------------------------------------------------------------------ refusals


def test_with_checkpoint_refuses_to_train_coded_matrices():
    model = ModelConfig(checkpoint=str(CODED / "qwen3_nf4"))
    message = r"coded in nf4, and codes have no gradient; train adapters \(model.lora"
    with pytest.raises(ValueError, match=message):
        checkpoints.with_checkpoint(model)
    adapted = dataclasses.replace(model, lora_rank=2)
    found = checkpoints.with_checkpoint(adapted)
    assert (found.layers, found.base, found.base_double) == (2, "nf4", False)
    for field, value in (("base", "int8"), ("base_targets", ("query",))):
        others = {"base": "nf4", field: value}
        wrong = dataclasses.replace(adapted, **others)
        with pytest.raises(ValueError, match=f"model.{field}=.* is not what the chec"):
            checkpoints.with_checkpoint(wrong)
    with pytest.raises(CheckpointError, match="in nf4, and model.base='int8' is anoth"):
        checkpoints.load(CODED / "llama_double", base="int8")


def edited(**changes):
    """A change of the JSON beside a matrix; None removes a key."""

    def change(tensors):
        state = json.loads(tensors[GATE + STATE].tobytes()) | changes
        state = {key: value for key, value in state.items() if value is not None}
        content = json.dumps(state).encode()
        tensors[GATE + STATE] = np.frombuffer(content, np.uint8)

    return change


def replaced(end, array):
    return lambda tensors: tensors.update({GATE + end: np.asarray(array)})


def removed(end):
    return lambda tensors: tensors.pop(GATE + end)


@pytest.mark.parametrize(
    "change, message",
    [
        (removed(".absmax"), ".absmax is missing"),
        (removed(".quant_map"), ".quant_map is missing"),
        (removed(STATE), ".quant_state.bitsandbytes__nf4 is missing"),
        (removed(".nested_absmax"), ".nested_absmax is missing"),
        (removed(".nested_quant_map"), ".nested_quant_map is missing"),
        (removed(""), " is none of the model"),
        (replaced("", np.zeros((64, 1), np.uint8)), r" must have shape \(10240, 1"),
        (replaced("", np.zeros((10240, 1), np.int32)), " is of type I32; only U8"),
        (
            replaced(".absmax", np.zeros(319, np.uint8)),
            r"absmax must have shape \(320,",
        ),
        (
            replaced(".absmax", np.zeros(320, np.int32)),
            "absmax is of type I32; only F3",
        ),
        (replaced(".nested_absmax", np.ones(1, "f")), r"must have shape \(2,\)"),
        (replaced(".quant_map", np.arange(16, dtype="f")), "has other values than nf4"),
        (replaced(".nested_quant_map", np.ones(256, "f")), "values than the dynamic t"),
        (replaced(STATE, np.zeros(4, np.uint8)), "bitsandbytes__nf4: not valid JSON"),
        (replaced(STATE, np.frombuffer(b"[]", "u1")), "is no object, but \\[\\]"),
        (replaced(STATE[:-3] + "fp4", np.zeros(4, "u1")), "is coded in fp4, which is"),
        (edited(quant_type="fp4"), "quant_type must be 'nf4', got 'fp4'"),
        (edited(blocksize=128), "blocksize must be 64, got 128"),
        (edited(nested_blocksize=128), "nested_blocksize must be 256, got 128"),
        (edited(shape=[64, 320]), r"shape must be \[320, 64\], got \[64, 320\]"),
        (edited(nested_offset=None), "nested_offset must be a number, got None"),
    ],
)
def test_damaged_matrix_is_refused_with_its_tensor(change, message, tmp_path):
    directory = changed(copied("llama_double", tmp_path), change)
    match = rf"model.safetensors: tensor {GATE}.*{message}"
    with pytest.raises(CheckpointError, match=match):
        checkpoints.load(directory)


def test_coded_matrices_of_a_transposed_family_are_refused(tmp_path):
    directory = texts.checkpoint("gpt2", tmp_path)
    raw = json.loads((directory / "config.json").read_text())
    raw |= {"quantization_config": CODED_NF4}
    (directory / "config.json").write_text(json.dumps(raw))

    def change(tensors):
        (name, *_) = (name for name in tensors if name.endswith("attn.c_proj.weight"))
        tensors[f"{name}.absmax"] = np.ones(4, np.float32)

    with pytest.raises(
        CheckpointError, match="c_proj.weight: is coded, which is not i"
    ):
        checkpoints.load(changed(directory, change))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"SCB": np.ones(63, "f")}, r"SCB must have shape \(64,\)"),
        ({"SCB": np.ones(64, np.float16)}, "SCB is of type F16; only F32"),
        ({"weight_format": np.uint8(2)}, "weight_format: is not 0: matrices are read"),
        ({"weight": np.zeros((64, 64), "u1")}, "weight is of type U8; only I8"),
    ],
)
def test_damaged_matrix_in_8_bits_is_refused_with_its_tensor(change, message, tmp_path):
    start = "model.layers.0.mlp.gate_proj."
    named = {start + end: np.asarray(array) for end, array in change.items()}
    directory = changed(copied("qwen3_int8", tmp_path), lambda x: x.update(named))
    with pytest.raises(CheckpointError, match=rf"tensor {start}{message}"):
        checkpoints.load(directory)
