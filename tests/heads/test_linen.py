"""The Linen head: nn.Dense's checkpoints and numbers, the NNX head's verbs."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn, nnx

import jaxmem
import jaxmem.heads.nnx
from jaxmem.heads.linen import LMHead
from jaxmem.heads.verbs import HeadVerbs
from tests.helpers import oracle
from tests.helpers.cases import full, slow

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")

D, V = 8, 37
BATCH = (3, 5)
KEY = jax.random.key(0)
LABELS = np.random.default_rng(0).integers(0, V, BATCH, dtype=np.int32)
LABELS[0, :2] = -1
KEEP = np.random.default_rng(1).random(BATCH) < 0.7
HIDDEN = jax.random.normal(jax.random.key(1), (*BATCH, D))


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def assert_close(left, right, atol=1e-6):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), left, right)


# Own weights: in the place of nn.Dense


@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("given", [{}, {"use_bias": True}, {"use_bias": False}])
def test_same_initial_params_as_dense(given, param_dtype):
    given = given | {"param_dtype": param_dtype}
    expected = nn.Dense(V, **given).init(KEY, HIDDEN)
    assert_same(LMHead(V, **given).init(KEY, HIDDEN), expected)


@pytest.mark.parametrize("method, args", [("__call__", ()), ("loss", (LABELS,))])
def test_linen_methods_create_params_and_equal_nnx(method, args):
    options = dict(softcap=2.0, chunk=4, vocab_size=V - 2, dtype=jnp.bfloat16)
    head, labels = LMHead(V, **options), [np.minimum(a, V - 3) for a in args]
    variables = head.init(KEY, HIDDEN, *labels, method=method)
    assert_same(variables, nn.Dense(V).init(KEY, HIDDEN))
    twin = jaxmem.heads.nnx.LMHead(D, V, rngs=nnx.Rngs(0), **options)
    nnx.update(twin, jax.tree.map(nnx.Param, variables["params"]))
    got = head.apply(variables, HIDDEN, *labels, method=method)
    assert_same(got, getattr(twin, method)(HIDDEN, *labels))


@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("input_dtype", [jnp.float32, jnp.bfloat16])
def test_same_logits_as_dense(dtype, input_dtype):
    options = dict(dtype=dtype, bias_init=nn.initializers.normal(1.0))
    dense, head = nn.Dense(V, **options), LMHead(V, **options)
    hidden = HIDDEN.astype(input_dtype)
    variables = dense.init(KEY, hidden)
    assert_same(head.apply(variables, hidden), dense.apply(variables, hidden))


@pytest.mark.parametrize("source, target", [(nn.Dense, LMHead), (LMHead, nn.Dense)])
def test_orbax_checkpoint_loads_into_either_head(tmp_path, source, target):
    saved, loaded = source(V), target(V)
    variables = saved.init(KEY, HIDDEN)
    template = loaded.init(jax.random.key(9), HIDDEN)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "head", variables)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "head", template)
    assert_same(loaded.apply(restored, HIDDEN), saved.apply(variables, HIDDEN))


def test_two_methods_in_one_apply_share_params():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, hidden, labels):
            head = LMHead(V, name="head")
            return head.loss(hidden, labels), head(hidden)

    variables = Model().init(KEY, HIDDEN, LABELS)
    assert set(variables["params"]) == {"head"}
    assert set(variables["params"]["head"]) == {"kernel", "bias"}
    loss, logits = Model().apply(variables, HIDDEN, LABELS)
    log_p = jax.nn.log_softmax(logits)
    log_p = np.take_along_axis(np.asarray(log_p), np.abs(LABELS)[..., None], -1)[..., 0]
    np.testing.assert_allclose(loss, -log_p[LABELS >= 0].mean(), rtol=1e-6)


def negative_logprob(stats):
    return -stats.logprob


def divergence(stats, of_token):
    return of_token


LOGPROBS = -1.0 * LABELS[..., None]
TARGET = jaxmem.ForwardKL(jaxmem.Columns(LABELS[..., None], LOGPROBS))


@pytest.mark.parametrize(("name", "arguments"), [
    ("entropy", (HIDDEN,)), ("logprobs", (HIDDEN, LABELS)),
    ("token_stats", (HIDDEN, LABELS)), ("loss", (HIDDEN, LABELS)),
    ("token_loss", (negative_logprob, HIDDEN, LABELS)),
    ("support_logprobs", (HIDDEN, LABELS, LABELS[..., None])), ("topk", (HIDDEN, 2)),
    ("divergence", (HIDDEN, TARGET)),
    ("divergence_loss", (divergence, HIDDEN, LABELS, TARGET)),
    ("sample_ids", (HIDDEN, 2, KEY)),
])  # fmt: skip
def test_flax_sees_every_method(name, arguments):
    head, is_method = LMHead(V), lambda module, method: method == name

    def init(key):
        options = dict(method=name, capture_intermediates=is_method)
        return head.init_with_output(key, *arguments, **options)

    _, variables = jax.eval_shape(init, KEY)
    assert set(variables["intermediates"]) == {name}


def test_methods_are_in_the_class_body():
    """Linen does not bind those that are inherited."""
    methods = {name for name in dir(HeadVerbs) if not name.startswith("_")}
    assert methods and methods <= set(vars(LMHead))


# Tied weights


class BySetup(nn.Module):
    def setup(self):
        self.embed = nn.Embed(V, D)
        self.head = LMHead(tied_to=self.embed, chunk=4)

    def __call__(self, tokens, labels):
        return self.head.loss(self.embed(tokens), labels)


class ByCompact(nn.Module):
    @nn.compact
    def __call__(self, tokens, labels):
        embed = nn.Embed(V, D, name="embed")
        return LMHead(tied_to=embed, chunk=4).loss(embed(tokens), labels)


class ByRemat(nn.Module):
    @nn.compact
    def __call__(self, tokens, labels):
        embed = nn.Embed(V, D, name="embed")
        head = nn.remat(LMHead, methods=["loss"])(tied_to=embed, chunk=4)
        return head.loss(embed(tokens), labels)


@pytest.mark.parametrize("kind", [ByCompact, slow(BySetup), slow(ByRemat)])
def test_tied_embedding_sums_both_gradients(kind):
    model, tokens = kind(), np.maximum(LABELS[:, ::-1], 0)
    variables = jax.jit(model.init)(KEY, tokens, LABELS)
    assert jax.tree.map(jnp.shape, variables) == {
        "params": {"embed": {"embedding": (V, D)}}
    }
    grads = jax.jit(jax.grad(lambda v: model.apply(v, tokens, LABELS)))(variables)

    E = np.asarray(variables["params"]["embed"]["embedding"], np.float64)
    cotangent = {"logprob": np.full(LABELS.size, -1 / np.sum(LABELS >= 0))}
    h = E[tokens].reshape(-1, D)
    _, (dhidden, by_head, _) = oracle.head(h, E, LABELS.ravel(), cotangent)
    by_lookup = np.zeros_like(E)
    np.add.at(by_lookup, tokens.ravel(), dhidden)
    assert min(np.abs(by_head).max(), np.abs(by_lookup).max()) > 1e-2
    got = grads["params"]["embed"]["embedding"]
    np.testing.assert_allclose(got, by_head + by_lookup, atol=2e-6)


@pytest.mark.parametrize("dtype", [slow(None), jnp.bfloat16])
def test_tied_logits_are_those_of_attend(dtype):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, hidden):
            embed = nn.Embed(V, D, dtype=dtype)
            return LMHead(tied_to=embed)(hidden), embed.attend(hidden)

    got, expected = Model().init_with_output(KEY, HIDDEN)[0]
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(
        got.astype(jnp.float32), expected.astype(jnp.float32), rtol=0.02, atol=1e-5
    )


def test_tied_head_may_own_a_bias():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, hidden):
            embed = nn.Embed(V, D, name="embed")
            head = LMHead(tied_to=embed, use_bias=True, name="head")
            return head.entropy(hidden)

    shapes = jax.tree.map(jnp.shape, jax.eval_shape(Model().init, KEY, HIDDEN))[
        "params"
    ]
    assert shapes == {"embed": {"embedding": (V, D)}, "head": {"bias": (V,)}}


# Masks, types, transformations, memory


def test_all_masked_is_zero_with_zero_gradients():
    head = LMHead(V, chunk=4)
    variables = head.init(KEY, HIDDEN)
    hidden, nothing = jnp.full_like(HIDDEN, jnp.nan), np.zeros(BATCH, bool)

    def loss(variables, hidden):
        arguments = dict(where=nothing, z_loss=0.1, method="loss")
        return head.apply(variables, hidden, LABELS, **arguments)

    value_and_grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    value, grads = value_and_grad(variables, hidden)
    assert value == 0
    assert_same(grads, jax.tree.map(jnp.zeros_like, (variables, hidden)))


@pytest.mark.full
def test_gradient_in_parameter_type_with_float32_sums():
    head = LMHead(V, dtype=jnp.bfloat16)
    variables = head.init(KEY, HIDDEN)
    loss = jax.grad(lambda v: head.apply(v, HIDDEN, LABELS, method="loss"))
    grads = jax.jit(loss)(variables)
    kernel = grads["params"]["kernel"]
    assert kernel.dtype == jnp.float32
    rounded = kernel.astype(jnp.bfloat16).astype(jnp.float32)
    assert np.mean(np.asarray(kernel != rounded)) > 0.5


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, hidden, labels):
        @nn.remat
        def rows(head, total, row):
            loss = head.loss(*row, normalizer=np.sum(LABELS >= 0))
            return total + loss, None

        scan = nn.scan(rows, variable_broadcast="params", split_rngs={"params": False})
        head = LMHead(V, chunk=4, name="head")
        return scan(head, jnp.zeros(()), (hidden, labels))[0]


class Checkpointed(nn.Module):
    @nn.compact
    def __call__(self, hidden, labels):
        return nn.jit(nn.remat(LMHead, methods=["loss"]), methods=["loss"])(
            V, chunk=4, name="head"
        ).loss(hidden, labels)


@pytest.mark.parametrize("model", [slow(Scanned()), full(Checkpointed())])
def test_transformed_gradients(model):
    head = LMHead(V)
    plain = head.init(KEY, HIDDEN)["params"]
    shapes = jax.eval_shape(model.init, KEY, HIDDEN, LABELS)["params"]
    assert jax.tree.structure(shapes) == jax.tree.structure({"head": plain})

    def expected(params):
        return head.apply({"params": params}, HIDDEN, LABELS, method="loss")

    def transformed(params):
        return model.apply({"params": {"head": params}}, HIDDEN, LABELS)

    got = jax.jit(jax.grad(jax.checkpoint(transformed)))(plain)
    assert_close(got, jax.jit(jax.grad(expected))(plain))


def test_partitioned_params_are_unboxed():
    init = nn.with_partitioning(nn.initializers.normal(1.0), (None, "tp"))
    head = LMHead(V, kernel_init=init)
    variables = head.init(KEY, HIDDEN)
    assert nn.get_partition_spec(variables)["params"]["kernel"] == jax.P(None, "tp")
    loss = jax.jit(jax.grad(lambda v: head.apply(v, HIDDEN, LABELS, method="loss")))
    grads = loss(variables)
    assert isinstance(grads["params"]["kernel"], nn.Partitioned)
    assert_same(nn.unbox(grads), loss(nn.unbox(variables)))


# Errors


@pytest.mark.parametrize("error, match, options", [
    (TypeError, "features must be a positive", dict()),
    (TypeError, "features must be a positive", dict(features=0)),
    (TypeError, "tied_to must be an nn.Embed", dict(tied_to=nn.Dense(V))),
    (ValueError, f"features must be left out or {V}", dict(features=3,
     tied_to=nn.Embed(V, D))),
    (TypeError, "dtype must be a floating", dict(features=V, dtype=jnp.int32)),
    (ValueError, "softcap must be positive", dict(features=V, softcap=0.0)),
    (ValueError, "chunk must be a positive", dict(features=V, chunk=-1)),
    (TypeError, "gradient must be None", dict(features=V, gradient=2)),
    (ValueError, "vocab_size must be", dict(features=V, vocab_size=V + 1)),
    (ValueError, "implementation must be", dict(features=V, implementation="?")),
])  # fmt: skip
def test_bad_construction(error, match, options):
    with pytest.raises(error, match=match):
        LMHead(**options)


def test_bad_hidden():
    tied = LMHead(tied_to=nn.Embed(V, D))
    with pytest.raises(ValueError, match=rf"hidden must be \[..., {D}\]"):
        tied.init(KEY, jnp.ones((2, D + 1)))
    with pytest.raises(TypeError, match="hidden must be floating"):
        tied.init(KEY, jnp.ones((2, D), jnp.int32))
