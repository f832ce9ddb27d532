"""`jax.export` of a verb with a symbolic number of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxmem

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")
W = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)


def exported(chunk):
    (n,) = export.symbolic_shape("n")
    shapes = (
        jax.ShapeDtypeStruct((n, 8), jnp.float32),
        jax.ShapeDtypeStruct((n,), jnp.int32),
    )

    @jax.jit
    def run(h, y):
        return jaxmem.logprobs(h, W, y, chunk=chunk)

    return export.export(run)(*shapes)


@pytest.mark.full
@pytest.mark.parametrize("chunk", [32, "auto"])
def test_export_serves_any_number_of_tokens(chunk):
    rng, call = np.random.default_rng(1), exported(chunk).call
    for n in (5, 70):
        h, y = rng.standard_normal((n, 8)).astype(np.float32), np.arange(n) % 40
        got = call(h, y.astype(np.int32))
        np.testing.assert_allclose(got, jaxmem.logprobs(h, W, y), rtol=1e-5)


def test_export_of_one_chunk_names_symbolic_size():
    message = "^chunk must be a number of tokens or 'auto', not None, .* symbolic, n"
    with pytest.raises(ValueError, match=message):
        exported(None)
