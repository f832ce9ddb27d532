"""Matrices that are encoded as a checkpoint is read."""

import jax
import numpy as np
import pytest

from jaxmem import checkpoints
from jaxmem.models import coded_weights
from jaxmem.models.config import ModelConfig
from jaxmem.models.weights import by_path
from tests.helpers.cases import full
from tests.helpers.codes import encode

pytestmark = pytest.mark.usefixtures("quick_compilation")

TINY = "tests/checkpoints/tiny/qwen3"
LARGER = "tests/checkpoints/bitsandbytes/qwen3_nf4"  # of whole blocks, once decoded


@pytest.mark.parametrize(
    "base, options", [("int8", {}), ("nf4", {}), full("nf4", {"base_double": False})]
)
def test_load_encodes_each_matrix(base, options, tmp_path):
    directory = TINY
    if base == "nf4":
        directory = str(tmp_path / "plain")
        decoded = checkpoints.load(LARGER, base=None)
        checkpoints.save(directory, decoded, like=LARGER)
    plain = by_path(checkpoints.load(directory, dtype="float32"))
    options |= {"base": base}
    coded = by_path(checkpoints.load(directory, dtype="float32", **options))
    kernels = [p for p in plain if p.startswith("blocks/") and p.endswith("/kernel")]
    assert kernels and not coded.keys() & {*kernels}
    for path in kernels:
        double = options.get("base_double", True)
        expected = encode(plain[path].swapaxes(-1, -2), base, double)
        assert len(expected) == sum(name.startswith(path) for name in coded)
        for name, array in expected.items():
            np.testing.assert_array_equal(coded[f"{path}_{name}"], array)
    others = plain.keys() - {*kernels}
    for path in others:
        np.testing.assert_array_equal(coded[path], plain[path])


def test_load_places_codes():
    device = jax.devices("cpu")[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    coded = by_path(checkpoints.load(TINY, base="int8", sharding=sharding))
    own = by_path(checkpoints.load(TINY, base="int8"))
    for path, array in own.items():
        np.testing.assert_array_equal(coded[path], array)


def test_load_encodes_the_embedding_by_rows():
    options = {"base": "nf4", "base_targets": ("embedding",)}
    table = checkpoints.load(TINY).embed.embedding[...]
    coded = by_path(checkpoints.load(TINY, **options))
    for name, array in encode(table, "int8", block=16).items():
        np.testing.assert_array_equal(coded[f"embed/embedding_{name}"], array)


def test_with_checkpoint_refuses_codes_of_a_tied_embedding():
    named = ModelConfig(
        checkpoint="tests/checkpoints/tiny/gemma3", lora_rank=1, base="int8",
        base_targets=("embedding",),
    )  # fmt: skip
    with pytest.raises(ValueError, match="base_targets has 'embedding', but the head"):
        checkpoints.with_checkpoint(named)


def test_load_encodes_base_targets_alone():
    options = {"base": "int8", "base_targets": ("down",)}
    coded = by_path(checkpoints.load(TINY, **options))
    names = [path for path in coded if coded_weights.is_coded(path)]
    assert {coded_weights.kernel_path(name) for name in names} == {
        "blocks/feed_forward/down/kernel"
    }
