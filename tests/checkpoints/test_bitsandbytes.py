"""Checkpoints that bitsandbytes coded: their numbers, parts, and what is wrong.

make_bitsandbytes.py made bitsandbytes/, with logits of the decoded weights in float64.
"""

import dataclasses
import functools
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxmem import checkpoints
from jaxmem.checkpoints import CheckpointError
from jaxmem.checkpoints.adapter_tensors import target_of
from jaxmem.checkpoints.bitsandbytes import CodedTensors
from jaxmem.commands import cli
from jaxmem.models import coded_weights, structure
from jaxmem.models.coded_weights import DYNAMIC, NF4
from jaxmem.models.decoder import Decoder, ModelConfig
from jaxmem.models.weights import by_path
from tests.helpers import seeded, texts
from tests.helpers.cases import full, slow
from tests.helpers.codes import decode, encode
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
    return np.asarray(decode(arrays, jnp.float32))


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


@pytest.mark.parametrize(
    "name", ["llama_double", slow("qwen3_nf4"), full("qwen3_int8")]
)
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
    made = checkpoints.load(partly_plain(tmp_path))
    assert made.config.base_plain == ("1.gate",)
    weights = by_path(made)
    assert "blocks/feed_forward/gate/kernel_codes" in weights
    assert "blocks_1/feed_forward/gate/kernel" in weights
    for layer in ("0", "1"):
        name = GATE.replace(".1.", f".{layer}.")
        right = matrix_of(loaded("qwen3_nf4"), name)
        np.testing.assert_allclose(matrix_of(made, name), right, rtol=2**-8)


def test_saved_checkpoint_is_plain(tmp_path):
    source = CODED / "qwen3_nf4"
    right = loaded("qwen3_nf4", base=None)
    checkpoints.save(tmp_path / "out", right, like=source)
    assert checkpoints.read_config(tmp_path / "out").coding is None
    made = checkpoints.load(tmp_path / "out")
    np.testing.assert_array_equal(matrix_of(made, GATE), matrix_of(right, GATE))


def encode_files(directory):
    """Code the matrices of whole blocks in a checkpoint's layers."""

    def change(tensors):
        for name, matrix in list(tensors.items()):
            if "layers." not in name or matrix.ndim != 2 or matrix.shape[1] % 64:
                continue
            arrays = jax.device_get(encode(jnp.asarray(matrix), "nf4"))
            state = {
                "quant_type": "nf4", "blocksize": 64, "shape": matrix.shape,
                "nested_blocksize": 256, "nested_offset": float(arrays["scale_offset"]),
            }  # fmt: skip
            tensors[name] = arrays["codes"].reshape(-1, 1)
            tensors |= {
                f"{name}.absmax": arrays["scales"].reshape(-1),
                f"{name}.quant_map": NF4,
                f"{name}.nested_absmax": arrays["scale_scales"],
                f"{name}.nested_quant_map": DYNAMIC,
                name + STATE: np.frombuffer(json.dumps(state).encode(), np.uint8),
            }

    raw = json.loads((directory / "config.json").read_text())
    raw |= {"quantization_config": CODED_NF4}
    (directory / "config.json").write_text(json.dumps(raw))
    return changed(directory, change)


ATTENTION = "query", "key", "value"


@pytest.mark.parametrize(
    "family, targets, double",
    [
        # outputs of one tensor, one after the other or by head
        full("phi3", (*ATTENTION, "output", "gate", "up"), False),
        full("gpt_neox", (*ATTENTION, "output", "up"), False),
        # a tensor of each expert
        full("qwen3_moe", (*ATTENTION, "gate", "up"), True),
        # neighbours that are rotated together
        full("cohere", (*ATTENTION, "output", "gate", "up"), False),
    ],
)
def test_load_has_codes_of_each_layout(family, targets, double, tmp_path):
    directory = encode_files(texts.checkpoint(family, tmp_path))
    decoder = checkpoints.load(directory)
    assert decoder.config.base_targets == targets
    assert decoder.config.base_double is double
    weights = by_path(decoder)
    plain = by_path(checkpoints.load(directory, base=None, param_dtype="float32"))
    coded = {path for path in map(coded_weights.kernel_path, weights)} - weights.keys()
    assert coded == {
        path
        for path in plain
        if path.startswith("blocks") and path.endswith("/kernel")
        and target_of(path.removesuffix("/kernel")) in targets
    }  # fmt: skip
    for path in coded:
        arrays = {
            name: weights[f"{path}_{name}"]
            for name in coded_weights.ARRAYS
            if f"{path}_{name}" in weights
        }
        made = decode(arrays, jnp.float32).swapaxes(-1, -2)
        np.testing.assert_allclose(made, plain[path], rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*only the text part")
def test_text_part_of_coded_model_is_read(tmp_path):
    """Names have another prefix, and images' tensors may be coded, too."""
    record = np.load(seeded.RECORDS / "gemma3.npz")
    directory = encode_files(seeded.write(record, tmp_path / "text"))
    text = json.loads((directory / "config.json").read_text())
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "quantization_config": text.pop("quantization_config"),
        "text_config": text,
        "vision_config": {},
    }
    right = by_path(checkpoints.load(directory))
    (directory / "config.json").write_text(json.dumps(whole))

    def change(tensors):
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_tower.x.weight"] = np.zeros((2, 1), np.uint8)
        tensors["vision_tower.x.weight.absmax"] = np.zeros(2, np.float32)

    decoder = checkpoints.load(changed(directory, change))
    assert decoder.config.base == "nf4" and decoder.config.base_double
    made = by_path(decoder)
    assert made.keys() == right.keys()
    for path, weight in right.items():
        np.testing.assert_array_equal(made[path], weight)


# ------------------------------------------------------------------ refusals


def test_with_checkpoint_refuses_to_train_coded_matrices():
    model = ModelConfig(checkpoint=str(CODED / "qwen3_nf4"))
    message = r"coded in nf4, and codes have no gradients; train adapters \(model.lora"
    with pytest.raises(ValueError, match=message):
        checkpoints.with_checkpoint(model)
    adapted = dataclasses.replace(model, lora_rank=2)
    found = checkpoints.with_checkpoint(adapted)
    assert (found.layers, found.base, found.base_double) == (2, "nf4", False)
    for field, value in (("base", "int8"), ("base_targets", ("query",))):
        others = {"base": "nf4", field: value}
        wrong = dataclasses.replace(adapted, **others)
        with pytest.raises(ValueError, match=f"model.{field}=.* differs from the chec"):
            checkpoints.with_checkpoint(wrong)
    for name in ("llama_double", "qwen3_nf4"):
        with pytest.raises(CheckpointError, match="in nf4, and base='int8' differs;"):
            checkpoints.load(CODED / name, base="int8")


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
        (removed(""), " is not part of the model"),
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
        (
            replaced(".quant_map", np.arange(16, dtype="f")),
            "does not have the values of nf4",
        ),
        (
            replaced(".nested_quant_map", np.ones(256, "f")),
            "not have the values of the dynamic t",
        ),
        (replaced(STATE, np.zeros(4, np.uint8)), "bitsandbytes__nf4: not valid JSON"),
        (replaced(STATE, np.frombuffer(b"[]", "u1")), "is not an object but \\[\\]"),
        (replaced(STATE[:-3] + "fp4", np.zeros(4, "u1")), "is coded in fp4, which is"),
        (edited(quant_type="fp4"), "quant_type must be 'nf4', got 'fp4'"),
        (edited(blocksize=128), "blocksize must be 64, got 128"),
        (edited(nested_blocksize=128), "nested_blocksize must be 256, got 128"),
        (edited(shape=[64, 320]), r"shape must be \[320, 64\], got \[64, 320\]"),
        (edited(nested_offset=None), "nested_offset must be a float32, got None"),
        (edited(nested_offset=10**300), "nested_offset must be a float32, got <int"),
        (
            replaced(".nested_absmax", np.array([1, np.nan], "f")),
            r"\.nested_absmax: entry 1 is nan; a scale is finite and at least 0",
        ),
        (
            replaced(".nested_absmax", np.array([-1, 1], "f")),
            r"\.nested_absmax: entry 0 is -1\.0; a scale is",
        ),
    ],
)
def test_damaged_matrix_is_refused_with_its_tensor(change, message, tmp_path):
    directory = changed(copied("llama_double", tmp_path), change)
    match = rf"model.safetensors: tensor {GATE}.*{message}"
    with pytest.raises(CheckpointError, match=match):
        checkpoints.load(directory)


def damaged_entry(name, entry, value):
    """A change of one scale."""

    def change(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name][entry] = value

    return change


@pytest.mark.parametrize("value", ["nan", "inf", "-1.0"])
@pytest.mark.parametrize(
    "directory, end", [("qwen3_nf4", "weight.absmax"), ("qwen3_int8", "SCB")]
)
@pytest.mark.parametrize("options", [{}, {"base": None}])
def test_damaged_scale_is_refused_with_its_tensor(
    value, directory, end, options, tmp_path
):
    name = f"model.layers.0.mlp.gate_proj.{end}"
    change = damaged_entry(name, 5, float(value))
    match = f"model.safetensors: tensor {name}: entry 5 is {value}; a scale is finite"
    with pytest.raises(CheckpointError, match=match):
        checkpoints.load(changed(copied(directory, tmp_path), change), **options)


def test_coded_vector_is_refused(tmp_path):
    name = "model.layers.1.input_layernorm.weight"
    directory = changed(
        copied("qwen3_nf4", tmp_path),
        lambda tensors: tensors.update({f"{name}.absmax": np.ones(1, "f")}),
    )
    with pytest.raises(CheckpointError, match=f"tensor {name}: is coded, but has 1 ax"):
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
        ({"weight_format": np.uint8(2)}, "weight_format: is not 0, but jaxmem reads"),
        ({"weight": np.zeros((64, 64), "u1")}, "weight is of type U8; only I8"),
    ],
)
def test_damaged_matrix_in_8_bits_is_refused_with_its_tensor(change, message, tmp_path):
    start = "model.layers.0.mlp.gate_proj."
    named = {start + end: np.asarray(array) for end, array in change.items()}
    directory = changed(copied("qwen3_int8", tmp_path), lambda x: x.update(named))
    with pytest.raises(CheckpointError, match=rf"tensor {start}{message}"):
        checkpoints.load(directory)


# ------------------------------------------------------------------ merging


def adapted(directory, **changes):
    """A decoder of a checkpoint with adapters that change what it computes."""
    config = checkpoints.read_config(directory).model
    targets = "query", "key", "down"
    options = {"dtype": "float32", "param_dtype": "bfloat16", "lora_rank": 2}
    options |= {"lora_targets": targets, **changes}
    config = dataclasses.replace(config, **options)
    shapes = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    weights = checkpoints.read_weights(directory, config)
    flat = dict(traverse_util.flatten_dict(weights, sep="/"))
    rng = np.random.default_rng(0)
    for path, leaf in by_path(shapes).items():
        if path not in flat:
            flat[path] = jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype)
    nested = traverse_util.unflatten_dict(flat, sep="/")
    return nnx.merge(nnx.split(shapes)[0], nested)


def partly_plain(tmp_path):
    """A directory in which one layer has a plain matrix of a kind that is coded."""
    tensors = CodedTensors(CODED / "qwen3_nf4", "nf4")
    plain = tensors.read(GATE, (64, 64), (slice(None), slice(None)))

    def change(tensors):
        for name in [name for name in tensors if name.startswith(GATE)]:
            del tensors[name]
        tensors[GATE] = plain.astype(jnp.bfloat16)

    return changed(copied("qwen3_nf4", tmp_path), change)


@pytest.mark.parametrize(
    "name", [full("qwen3_int8"), full("llama_double"), "qwen3_nf4"]
)
def test_merge_adds_adapters_to_decoded_matrices_and_rounds_once(name):
    decoder = adapted(CODED / name)
    made = checkpoints.merge_codes(decoder)
    assert made.decoder.config.base is None and made.decoder.config.lora_rank == 0
    assert made.coding is None and 2**-11 < made.rounding < 2**-8
    module, layer = "blocks/feed_forward/down", decoder.config.layers - 1
    A, B = (np.float64(by_path(decoder)[f"{module}/lora_{x}"][layer]) for x in "ab")
    tensor = f"model.layers.{layer}.mlp.down_proj.weight"
    right = matrix_of(decoder, tensor) + (8 * np.matmul(A, B)).T
    own = matrix_of(made.decoder, tensor)
    assert by_path(made.decoder)[f"{module}/kernel"].dtype == jnp.bfloat16
    np.testing.assert_allclose(own, right, rtol=2**-8, atol=1e-6)
    plain = tensor.replace("down", "up")
    right = matrix_of(decoder, plain)
    np.testing.assert_allclose(matrix_of(made.decoder, plain), right, rtol=2**-8)


@pytest.mark.full
def test_merged_decoder_of_codes_computes_the_same(tmp_path):
    directory = partly_plain(tmp_path)
    decoder = adapted(directory, param_dtype="float32")
    assert len(structure.stacks(decoder.config)) == 2
    made = checkpoints.merge(decoder)
    assert len(structure.stacks(made.config)) == 1
    tokens = expected("qwen3_nf4")["tokens"]
    logits = logits_of(decoder, tokens)
    scale = np.abs(logits).max()
    np.testing.assert_allclose(logits_of(made, tokens), logits, atol=1e-5 * scale)
    checkpoints.save(tmp_path / "out", made, like=directory)
    with pytest.raises(CheckpointError, match="has matrices in nf4; decode them with"):
        checkpoints.save(tmp_path / "b", loaded("qwen3_nf4"), like=CODED / "qwen3_nf4")


@pytest.mark.full
def test_adapter_of_divided_stacks_is_read_as_saved(tmp_path):
    directory = partly_plain(tmp_path)
    decoder = adapted(directory)
    checkpoints.save_adapter(tmp_path / "adapter", decoder, base=str(directory))
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for layer in (0, 1):
        end = f"layers.{layer}.mlp.down_proj.lora_A.weight"
        assert f"base_model.model.model.{end}" in names
    made = by_path(checkpoints.load(directory, adapter=tmp_path / "adapter"))
    for path, weight in by_path(decoder).items():
        np.testing.assert_array_equal(made[path], weight)


@pytest.mark.full
def test_merge_codes_measures_the_coding(tmp_path):
    plain = loaded("llama_double", base=None)
    checkpoints.save(tmp_path / "plain", plain, like=CODED / "llama_double")
    originals = by_path(plain)
    decoder = adapted(tmp_path / "plain", base="nf4", base_targets=("down", "up"))
    made = checkpoints.merge_codes(decoder, originals.__getitem__)
    squares = np.zeros(2)
    for name in ("up", "down"):
        for layer in ("0", "1"):
            tensor = f"model.layers.{layer}.mlp.{name}_proj.weight"
            right = matrix_of(plain, tensor)
            squares += (
                np.square(matrix_of(decoder, tensor) - right).sum(),
                np.square(right).sum(),
            )
    assert made.coding is not None
    assert made.coding == pytest.approx(np.sqrt(squares[0] / squares[1]), rel=1e-4)
    assert 0 < made.coding < 0.1


# ------------------------------------------------------------------ commands


@pytest.mark.full
def test_export_says_what_coded_matrices_lost(tmp_path, capsys):
    base = texts.coded_checkpoint("qwen3_nf4", tmp_path)
    decoder = adapted(base)
    checkpoints.save_adapter(tmp_path / "adapter", decoder, base=str(base))
    record = json.loads((tmp_path / "adapter" / "base.json").read_text())
    assert record["base"] == "nf4" and record["base_double"] is False
    arguments = ["export", str(tmp_path / "adapter")]
    out = str(tmp_path / "merged")
    assert cli.main([*arguments, "--merge", "--out", out]) == 0
    _, said = capsys.readouterr().out.strip().splitlines()
    begin = (
        f"matrices are decoded from the nf4 codes of {base}, and are not those of the"
    )
    assert said.startswith(begin)
    assert re.search(r"rounding to bfloat16 changed them by 0\.1\d% \(root mean", said)
    assert checkpoints.read_config(out).coding is None
    tensor = GATE.replace("gate", "down")
    A, B = (by_path(decoder)[f"blocks/feed_forward/down/lora_{x}"][1] for x in "ab")
    right = matrix_of(decoder, tensor) + (8 * np.matmul(np.float64(A), np.float64(B))).T
    made = matrix_of(checkpoints.load(out), tensor)
    np.testing.assert_allclose(made, right, rtol=2**-8, atol=1e-6)
    assert cli.main([*arguments, "--out", str(tmp_path / "copy")]) == 0
    assert capsys.readouterr().out.endswith(f"{base}, whose matrices are in nf4\n")


def test_adapter_with_its_base_has_the_matrices_of_its_record(tmp_path):
    """A base by name codes all matrices; the record says which ones were coded."""
    plain = tmp_path / "plain"
    checkpoints.save(plain, loaded("qwen3_nf4", base=None), like=CODED / "qwen3_nf4")
    decoder = adapted(plain, base="int8", base_targets=("down",))
    checkpoints.save_adapter(tmp_path / "adapter", decoder, base=str(plain))
    adapter = {"adapter": tmp_path / "adapter"}
    again = checkpoints.load(plain, **adapter, base="int8")
    assert again.config.base_targets == ("down",)
    others = checkpoints.load(plain, **adapter, base="int8", base_targets=("up",))
    assert others.config.base_targets == ("up",)


@pytest.mark.full
def test_export_measures_codes_of_a_plain_base(tmp_path, capsys):
    base = tmp_path / "plain"
    checkpoints.save(base, loaded("qwen3_nf4", base=None), like=CODED / "qwen3_nf4")
    decoder = adapted(base, base="int8")
    checkpoints.save_adapter(tmp_path / "adapter", decoder, base=str(base))
    adapter = checkpoints.load(base, adapter=tmp_path / "adapter", dtype="float32")
    assert adapter.config.base == "int8"
    plain = checkpoints.load(base, adapter=tmp_path / "adapter", base=None)
    assert plain.config.base is None and plain.config.lora_rank == 2
    with pytest.raises(
        CheckpointError, match="base.json: .* on a base in int8, but the"
    ):
        checkpoints.load(CODED / "qwen3_nf4", adapter=tmp_path / "adapter")
    out = str(tmp_path / "merged")
    arguments = ["export", str(tmp_path / "adapter"), "--merge", "--out", out]
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out.splitlines()[1]
    begin = (
        f"matrices are decoded from int8 codes of {base}, and differ from its own by 0"
    )
    assert said.startswith(begin)


@pytest.mark.full
def test_commands_read_a_coded_checkpoint(tmp_path, capsys):
    base, plain = texts.coded_checkpoint("qwen3_nf4", tmp_path), tmp_path / "plain"
    assert cli.main(["export", str(base), "--out", str(plain)]) == 0
    assert "decoded from the nf4 codes" in capsys.readouterr().out
    (tmp_path / "texts.jsonl").write_text('{"text": "a cat sat on the mat"}\n')
    scores = []
    for directory in (base, plain):
        out = tmp_path / f"{directory.name}.jsonl"
        command = ["score", str(directory), str(tmp_path / "texts.jsonl")]
        assert cli.main([*command, "--out", str(out), "--dtype", "float32"]) == 0
        scores.append(json.loads(out.read_text())["logprobs"])
    np.testing.assert_allclose(*scores, atol=0.05)
    command = ["generate", str(base), "a cat", "--max-new-tokens", "4"]
    assert cli.main([*command, "--temperature", "0"]) == 0


RUN = """
data.source = "words.txt"
data.sequence_length = 32
data.batch_size = 2
data.held_out = 0.0
optimizer.warmup_steps = 1
run.steps = 2
run.out_dir = "run"
run.compare_heads = False
"""


@pytest.mark.full
@pytest.mark.usefixtures("no_picture")
def test_run_trains_adapters_of_a_coded_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base = texts.coded_checkpoint("llama_double", tmp_path)
    (tmp_path / "words.txt").write_text("a cat sat on the mat. " * 200)
    (tmp_path / "tiny.gin").write_text(RUN)
    command = ["train", "tiny.gin", f"model.checkpoint={base}"]
    assert cli.main(command) == 2
    assert "coded in nf4, and codes have no gradient" in capsys.readouterr().err
    assert cli.main([*command, "model.lora_rank=2", "optimizer.learning_rate=0.1"]) == 0
    said = capsys.readouterr().out
    assert "adapter" in said and "of a base in nf4" in said
    assert json.loads((tmp_path / "run/adapter/base.json").read_text())["base"] == "nf4"
    assert cli.main(["export", "run", "--merge", "--out", "merged"]) == 0
    assert "decoded from the nf4 codes of" in capsys.readouterr().out
    assert checkpoints.load("merged").config.base is None
