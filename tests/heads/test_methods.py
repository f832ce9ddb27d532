"""Methods of Flax heads: each has the program of the function of the head's weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from jaxmem.heads import linen as linen_heads, nnx as nnx_heads
from tests.helpers import functions
from tests.helpers.cases import full
from tests.helpers.functions import FUNCTIONS, K, Methods

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")

D, V, BATCH = 8, 37, (3, 5)
SOFTCAP, VOCAB_SIZE, CHUNK = 5.0, V - 3, 4
OWN = dict(softcap=SOFTCAP, vocab_size=VOCAB_SIZE, chunk=CHUNK)
KEEP = np.random.default_rng(1).random(BATCH) < 0.7
KEY = jax.random.key(5)


def nnx_head(weights, **options):
    """A head of NNX with these weights, which may be traced."""
    head = nnx.eval_shape(
        lambda: nnx_heads.LMHead(D, V, rngs=nnx.Rngs(0), **OWN | options)
    )
    graph, state = nnx.split(head)
    leaves = weights["bias"], weights["kernel"]
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), leaves))


def linen_head(weights, **options):
    """A head of Linen, bound to these weights."""
    return linen_heads.LMHead(V, **OWN | options).bind({"params": weights})


HEADS = {"nnx": nnx_head, "linen": linen_head}


def operands(dtype=jnp.float32):
    """Operands of every function, with the tokens' shape, and a head's weights."""
    p = functions.make(0, KEEP.size, D, V)
    p |= {k: np.asarray(p[k], dtype) for k in ("hidden", "W", "bias")}
    of_tokens = {k: p[k].reshape(*BATCH, *p[k].shape[1:]) for k in functions.OF_TOKENS}
    weights = {"kernel": p["W"].T, "bias": p["bias"]}
    return p | of_tokens | {"vocab_size": VOCAB_SIZE}, weights


def program(name, module_of, options, dtype=jnp.float32):
    """The program of a function's value and gradients, or of its value alone."""
    function, (p, weights) = FUNCTIONS[name], operands(dtype)

    def call(hidden, weights):
        module, head = module_of(weights)
        result = function.call(module, p | {"hidden": hidden}, head, options)
        return functions.weighted_sum(result), result

    if function.trained:
        call = jax.grad(call, (0, 1), has_aux=True)
    return jax.jit(call).lower(p["hidden"], weights).as_text()


def of_methods(kind, **options):
    return lambda weights: (Methods(HEADS[kind](weights, **options)), None)


def of_functions(weights):
    head = weights["kernel"], weights["bias"], SOFTCAP, VOCAB_SIZE, "dv"
    return jaxmem, jaxmem.Head(*head)


NAMES = functions.each_once([
    name for name in FUNCTIONS if hasattr(nnx_heads.LMHead, name.split()[0])
])  # fmt: skip


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", NAMES)
def test_method_equals_function_of_weights(name, kind):
    options = {"where": KEEP, "temperature": 0.7}
    # A chunk of logits is no chunk of a support's columns.
    chunk = {} if "support" in name else {"chunk": CHUNK}
    got = program(name, of_methods(kind), options)
    assert got == program(name, of_functions, options | chunk)


OF_GRADIENTS = [name for name, function in FUNCTIONS.items() if function.blocks]


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    "name", [name if name == "logprobs" else full(name) for name in OF_GRADIENTS]
)
def test_gradient_of_the_call_or_of_the_head(name, kind):
    """The one that a call names comes first."""
    own, named = jaxmem.Recompute(2), {"gradient": jaxmem.Sample(4), "key": KEY}
    head, dtype = of_methods(kind, gradient=own), jnp.bfloat16  # float32 has no blocks
    programs = [program(name, of_functions, {"chunk": CHUNK}, dtype)]
    for options, same in ({}, {"gradient": own}), (named, named):
        want = program(name, of_functions, same | {"chunk": CHUNK}, dtype)
        assert program(name, head, options, dtype) == want
        programs.append(want)
    assert len({*programs}) == 3


@pytest.mark.parametrize("kind", HEADS)
def test_entries_are_of_a_call_and_not_of_a_head(kind):
    p, weights = operands()
    head = HEADS[kind](jax.tree.map(jnp.asarray, weights))
    entries = head.record_entries(p["hidden"], p["labels"], K, KEY)
    gradient = jaxmem.Recorded(entries)
    loss = head.loss(p["hidden"] * 1.02, p["labels"], gradient=gradient)
    assert np.isfinite(loss) and loss.shape == ()
    with pytest.raises(ValueError, match="entries are of one call's tokens"):
        HEADS[kind](weights, gradient=gradient)
