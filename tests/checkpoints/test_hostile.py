"""Files made of nasty values: a right load or an error that names the file, no third.

The files are those of a checkpoint: four of JSON and the header of the tensors.
"""

import collections
import json
import math
import pathlib
import struct

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxmem import checkpoints
from jaxmem.base.fields import value_of, values_of
from jaxmem.checkpoints.adapter_config import read_adapter_config
from jaxmem.checkpoints.families import FAMILIES
from jaxmem.checkpoints.tensors import Tensors
from jaxmem.models.decoder import ModelConfig
from tests.helpers import nasty, texts
from tests.helpers.architectures import GEMMA2, GEMMA3, GEMMA3_4B, LLAMA3, QWEN3, SCALED

TINY = pathlib.Path(__file__).parent / "tiny"


@pytest.fixture
def seen():
    """Counts loads and errors, for a property that sees no load holds of anything."""
    counts = collections.Counter()
    yield counts
    assert counts[True] >= 10 and counts[False] >= 100, counts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


# ------------------------------------------------------------------- config.json

CONFIGS = [QWEN3, LLAMA3, LLAMA3 | {"rope_scaling": SCALED}, GEMMA2, GEMMA3, GEMMA3_4B]
MORE_KEYS = [
    "rope_parameters", "rope_scaling", "layer_types", "dtype", "partial_rotary_factor",
    "quantization_config", "_sliding_window_pattern", "use_sliding_window", "what",
]  # fmt: skip
likely = st.sampled_from(
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "llama3"},
        {"type": ["x"]},
        {"full_attention": {}, "sliding_attention": 5},
        ["full_attention"] * 28,
        ["sliding_attention", ["a"]],
        [["a"]],
        *("bfloat16", "float8", "gelu"),
    ]
)
PLAIN = {
    "num_hidden_layers": "layers", "hidden_size": "hidden", "intermediate_size": "ff",
    "num_attention_heads": "heads", "vocab_size": "vocab_size",
    "rms_norm_eps": "norm.eps",
}  # fmt: skip


@pytest.mark.slow
@nasty.profile(300)
@hypothesis.given(data=nasty.files(nasty.objects(CONFIGS, MORE_KEYS, likely)))
def test_config_json(folder, seen, data):
    path = folder / "config.json"
    path.write_bytes(data)
    loaded, made = nasty.outcome(lambda: checkpoints.read_config(folder), str(path))
    seen[loaded] += 1
    if not loaded:
        return
    raw = json.loads(data.decode("utf-8-sig"))
    raw = raw.get("text_config", raw)
    for key, field in PLAIN.items():
        if key in raw:
            assert value_of(made.model, field) == raw[key]
    numbers = [x for x in values_of(made.model).values() if isinstance(x, float)]
    assert all(map(math.isfinite, numbers)) and made.model.layers <= 10_000
    assert len(made.model.pattern) <= 10_000


# ------------------------------------------------------------------- the index

INDEX = {
    "metadata": {"total_size": 8},
    "weight_map": {"a": "one.safetensors", "b": "two.safetensors"},
}
names = st.sampled_from(
    [
        "one.safetensors", "./one.safetensors", "../x.safetensors", "/etc/passwd", ".",
        "..", "one.safetensors/..", "gone.safetensors", "a/../../x", "~/x", "x" * 300,
        "folder", "\x00", "one.safetensors\x00",
    ]
)  # fmt: skip


@pytest.mark.full
@nasty.profile(225)
@hypothesis.given(
    data=nasty.files(nasty.objects([INDEX], ["c"], names.map(lambda name: {"t": name})))
    | nasty.files(names.map(lambda name: {"weight_map": {"a": name}}))
)
def test_index_of_safetensors(folder, seen, data):
    inside = folder / "index"
    inside.mkdir(exist_ok=True)
    (inside / "folder").mkdir(exist_ok=True)
    for name in ("one", "two"):
        (inside / f"{name}.safetensors").touch()
    (folder / "x.safetensors").touch()  # what an index may not reach
    (inside / "model.safetensors.index.json").write_bytes(data)
    loaded, tensors = nasty.outcome(lambda: Tensors(inside), str(inside))
    seen[loaded] += 1
    if loaded:
        listed = json.loads(data.decode("utf-8-sig"))["weight_map"]
        assert list(tensors) == list(listed)
        for name, file in listed.items():
            assert tensors.file_of(name) == inside / file
            assert tensors.file_of(name).resolve().is_relative_to(inside.resolve())


# ------------------------------------------------------- tokenizer_config.json

TOKENIZER = {"eos_token": {"content": "</s>", "lstrip": False}, "model_max_length": 5}


@nasty.profile(225)
@hypothesis.given(
    data=nasty.files(
        nasty.objects([TOKENIZER, {"eos_token": "</s>"}], likely=st.just("</s>"))
    ),
    ids=nasty.values,
)
def test_tokenizer_config_json_and_eos_token_id(folder, seen, data, ids):
    source = folder / "llama"
    if not source.exists():
        texts.checkpoint("llama", folder)
        (source / "kept.json").write_text((source / "config.json").read_text())
    (source / "tokenizer_config.json").write_bytes(data)
    config = json.loads((source / "kept.json").read_text())
    (source / "config.json").write_text(nasty.text(config | {"eos_token_id": ids}))
    loaded, made = nasty.outcome(
        lambda: checkpoints.load_vocabulary(source), str(source)
    )
    seen[loaded] += 1
    if loaded:
        named = json.loads(data.decode("utf-8-sig")).get("eos_token")
        named = named["content"] if isinstance(named, dict) else named
        if named is None:
            assert made.eos == (ids[0] if isinstance(ids, list) else ids)
        else:
            assert made.eos == 2
        assert made.eos is None or (type(made.eos) is int and 0 <= made.eos < 40)


# --------------------------------------------------------- adapter_config.json

ADAPTER = json.loads((TINY / "qwen3/adapter/adapter_config.json").read_text())
modules = st.sampled_from([["q_proj"], "q_proj", ["q_proj", 5], [["q_proj"]], ["x"], 3])


@pytest.mark.slow
@nasty.profile(225)
@hypothesis.given(data=nasty.files(nasty.objects([ADAPTER], likely=modules)))
def test_adapter_config_json(folder, seen, data):
    path = folder / "adapter_config.json"
    path.write_bytes(data)
    loaded, made = nasty.outcome(
        lambda: read_adapter_config(ModelConfig(vocab_size=40), FAMILIES[0], folder),
        str(path),
    )
    seen[loaded] += 1
    if loaded:
        raw = json.loads(data.decode("utf-8-sig"))
        model = made.model
        assert model.lora_rank >= 1 and model.lora_alpha > 0
        if not (raw.get("rank_pattern") or raw.get("alpha_pattern")):
            scale = raw["r"] ** 0.5 if raw.get("use_rslora") else 1
            assert model.lora_rank == raw["r"]
            assert model.lora_alpha == raw["lora_alpha"] * scale
        found = len(model.lora_targets) + model.lora_head
        assert found == len(set(raw["target_modules"])) > 0


# ------------------------------------------------------------------- the header

NUMBERS = np.arange(4, dtype=np.float32)
HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "F32", "shape": [1, 2], "data_offsets": [8, 16]},
}
entries = st.sampled_from(
    [
        ["0", "8"], [0, 8], [8, 0], [0, 2**63], [-8, 8], [0], [], "I8", "F16", "F4",
        "C64", "F8_E4M3", [2**40, 2**40], [0, 2**60], [-1], [2, 1], {"a": []},
    ]
)  # fmt: skip


@st.composite
def tensor_files(draw):
    header = draw(nasty.files(nasty.objects([HEADER], likely=entries)))
    length = draw(st.sampled_from([len(header)] * 8 + [0, 2**63, len(header) + 99]))
    data = NUMBERS.tobytes()[: draw(st.sampled_from([16] * 6 + [15, 0]))]
    return struct.pack("<Q", length) + header + data


@pytest.mark.full
@nasty.profile(225)
@hypothesis.given(data=tensor_files() | st.binary(max_size=40))
def test_header_of_safetensors(folder, seen, data):
    path = folder / "model.safetensors"
    path.write_bytes(data)
    loaded, tensors = nasty.outcome(lambda: Tensors(folder), str(path))
    seen[False] += not loaded
    for name, shape in {"a": (2,), "b": (1, 2)}.items() if loaded else ():
        everything = (slice(None),) * len(shape)
        loaded, read = nasty.outcome(
            lambda shape=shape, name=name, everything=everything: tensors.read(
                name, shape, everything
            ),
            str(path),
        )
        seen[loaded] += 1
        if loaded and read.dtype == np.float32:
            start = 2 * (name == "b")
            np.testing.assert_array_equal(read.ravel(), NUMBERS[start : start + 2])
