"""Families on a mesh: as on one device, with every weight where its name says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem import checkpoints
from jaxmem.models.partitioning import Layout, MeshConfig
from tests.helpers import seeded
from tests.helpers.cases import slow
from tests.helpers.records import RECORDED, forward, record

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Latent attention and experts, the delta rule, vectors of each layer; test_partitioning
# has the rest of a decoder.
QUICK = "deepseek_v3", "qwen3_5", "gemma4_reuse"


@pytest.mark.full
@pytest.mark.parametrize("name", [n if n in QUICK else slow(n) for n in RECORDED])
def test_logits_on_mesh_equal_transformers(name, tmp_path):
    stored = record(name)
    directory = seeded.write(stored, tmp_path / name)
    layout = Layout(MeshConfig(fsdp=2, tensor=2))
    tokens = jnp.asarray(stored["tokens"], jnp.int32)
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    with layout.context():
        plain = nnx.to_pure_dict(nnx.split(checkpoints.load(directory))[1])
        definition, shapes = nnx.split(checkpoints.load(directory))
        placed = layout.of_weights(jax.eval_shape(lambda: nnx.to_pure_dict(shapes)))
        weights = jax.tree.map(
            lambda w, s: jax.device_put(w, s.sharding), plain, placed
        )

        @jax.jit
        def logits(weights):
            decoder = nnx.merge(definition, weights)
            return forward(decoder, tokens, jnp.ones_like(tokens), places)

        made = np.asarray(logits(weights))
    scale = np.abs(stored["logits"]).max()
    got = made[:, stored["places"]]
    np.testing.assert_allclose(got, stored["logits"], rtol=0, atol=1e-5 * scale)
