"""Heads on a mesh: their weights' metadata say how the vocabulary is split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmem
from jaxmem.heads import linen
from jaxmem.heads.nnx import HeadSharding, LMHead
from jaxmem.heads.verbs import Weights
from tests.helpers.cases import slow
from tests.helpers.meshes import jit

if jax.device_count() < 8:  # on one GPU; a CPU counts as eight (tests/conftest.py)
    pytest.skip(f"needs 8 devices, has {jax.device_count()}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("quick_compilation")

N, D, V = 10, 8, 40
RULES = (("embed", "fsdp"), ("vocab", "tensor"))
MESH = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
RULES_MESH = ("fsdp", "tensor")
SHARDING = HeadSharding(tokens="fsdp")


def problem():
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((N, D), np.float32)
    labels = rng.integers(0, V, N).astype(np.int32)
    labels[3:6] = -1
    return hidden, labels, rng.integers(0, V, (N, 3)).astype(np.int32)


def results(head, names=None):
    """Results of a verb of each kind, and gradients by hidden; the head is ready."""
    hidden, labels, ids = problem()
    ids[:, 0] = np.maximum(labels, 0)

    def loss(hidden):
        def of(stats):
            return stats.entropy - stats.logprob, {"right": stats.is_argmax}

        return head.token_loss(of, hidden, labels)

    verbs = {
        "logprobs": lambda hidden: head.logprobs(hidden, labels, temperature=0.7),
        "loss": lambda hidden: head.loss(hidden, labels, z_loss=1e-2),
        "token_loss": loss,
        "support": lambda hidden: head.support_logprobs(hidden, labels, ids),
    }

    def total(hidden):
        made = {name: verbs[name](hidden) for name in names or verbs}
        floats = jax.tree.leaves(made)
        return sum(jnp.sum(jnp.sin(1.0 * x)) for x in floats), made

    return jax.value_and_grad(total, has_aux=True)(hidden)


def assert_same(got, want):
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def collectives(fn, *operands):
    return jax.jit(fn).lower(*operands).compile().as_text().count(" all-reduce(")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_nnx(tied):
    init = nnx.initializers.normal(1.0)
    split = nnx.with_partitioning(init, ("tensor", "fsdp") if tied else RULES_MESH)

    def head(init, **options):
        rngs = nnx.Rngs(0)
        if tied:
            embed = nnx.Embed(V, D, embedding_init=init, rngs=rngs)
            return LMHead(tied_to=embed, **options)
        return LMHead(D, V, kernel_init=init, rngs=rngs, **options)

    plain = head(init)
    with jax.set_mesh(MESH):
        ours = head(split, sharding=SHARDING)
        W = ours.tied_to.embedding if tied else ours.kernel
        assert W[...].sharding.spec == P(*(("tensor", "fsdp") if tied else RULES_MESH))
        got = jit(lambda: results(ours))()
        made = collectives(lambda h: ours.logprobs(h, problem()[1]), problem()[0])
    assert_same(got, jit(lambda: results(plain))())
    assert made == 2  # of the statistics, one max and one sum


@pytest.mark.full
@pytest.mark.parametrize("tied", [slow(False), True])
def test_linen(tied):
    names = ("vocab", "embed") if tied else ("embed", "vocab")

    class Model(nn.Module):
        sharding: HeadSharding | None = None

        def setup(self):
            init = nn.with_logical_partitioning(nn.initializers.normal(1.0), names)
            options = {"sharding": self.sharding}
            if tied:
                self.embed = nn.Embed(V, D, embedding_init=init)
                options |= {"tied_to": self.embed}
            else:
                options |= {"features": V, "kernel_init": init, "use_bias": True}
            self.head = linen.LMHead(**options)

        def __call__(self):
            return results(self.head, ["logprobs", "support"])  # as NNX has the others

    plain = nn.unbox(jit(Model().init)(jax.random.key(0)))
    want = jit(Model().apply)(plain)
    with jax.set_mesh(MESH), nn.logical_axis_rules(RULES):
        assert_same(jit(Model(SHARDING).apply)(plain), want)
    if not tied:
        explicit = HeadSharding(MESH, tokens="fsdp", vocab="tensor", W_fsdp="fsdp")
        assert_same(jit(Model(explicit).apply)(plain), want)


def test_given_axes_precede_those_of_weights():
    W = jnp.zeros((D, V))

    def error(names, **given):
        weights = Weights(jaxmem.Head(W, layout="dv"), None, names)
        with pytest.raises(ValueError) as caught:
            HeadSharding(MESH, **given).apply(jaxmem.logprobs, weights)
        return str(caught.value)

    of_W, given = ("of W", "of V"), {"vocab": "tensor", "W_fsdp": "fsdp"}
    assert "'of V'" in error(of_W)
    assert "'of W'" in error(of_W, vocab="tensor", tokens="fsdp")
    for name in given:
        assert "'given'" in error(RULES_MESH, tokens="fsdp", **{name: "given"})


@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_logits_sharded_like_tokens_and_vocabulary(layout):
    mesh = jax.make_mesh((2, 4), RULES_MESH, axis_types=(AxisType.Explicit,) * 2)

    def of(shape, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def logits(hidden, W):
        embed = nnx.Embed(V, D, rngs=nnx.Rngs(0))
        tied = layout == "vd"
        head = LMHead(tied_to=embed) if tied else LMHead(D, V, rngs=nnx.Rngs(0))
        setattr(
            embed if tied else head, "embedding" if tied else "kernel", nnx.Param(W)
        )
        return head(hidden)

    W = of((V, D), "tensor") if layout == "vd" else of((D, V), None, "tensor")
    with jax.set_mesh(mesh):
        made = jax.eval_shape(logits, of((4, 6, D), None, "fsdp"), W)
        assert made.sharding.spec == P(None, "fsdp", "tensor")


def the_verbs_of(head):
    """Calls without arguments of the verbs that take groups."""
    hidden, labels, _ = problem()
    return {
        "logprobs": lambda: head.logprobs(hidden, labels),
        "token_stats": lambda: head.token_stats(hidden, labels),
        "entropy": lambda: head.entropy(hidden),
        "loss": lambda: head.loss(hidden, labels),
        "token_loss": lambda: head.token_loss(lambda x: x.entropy, hidden, labels)[0],
    }


@pytest.mark.parametrize("verb", the_verbs_of(None))
def test_groups_reach_the_verbs(verb):
    """The verbs refuse the groups, because 16 do not divide 40 columns."""
    rngs = nnx.Rngs(0)
    of_nnx = LMHead(D, V, rngs=rngs, vocab_groups=16)
    of_linen = linen.LMHead(V, vocab_groups=16)
    variables = of_linen.init(jax.random.key(0), problem()[0])
    for head in (of_nnx, of_linen.bind(variables)):
        with pytest.raises(ValueError, match="must divide the 40 columns of W, got 16"):
            the_verbs_of(head)[verb]()
    with pytest.raises(ValueError, match="vocab_groups must be a power of two, .* 3"):
        LMHead(D, V, rngs=rngs, vocab_groups=3)
    with pytest.raises(ValueError, match="vocab_groups must be a power of two, .* 3"):
        linen.LMHead(V, vocab_groups=3)


@pytest.mark.slow
def test_groups_on_a_mesh():
    """Columns that they do not divide are padded on any mesh."""
    made = []
    for shards in (1, 4):
        mesh = jax.make_mesh(
            (shards,), ("tensor",), axis_types=(AxisType.Auto,),
            devices=jax.devices()[:shards],
        )  # fmt: skip
        sharding = HeadSharding(mesh, vocab="tensor")
        head = LMHead(D, V, rngs=nnx.Rngs(0), sharding=sharding, vocab_groups=16)
        made.append(jax.device_get(jit(the_verbs_of(head)["logprobs"])()))
    jax.tree.map(np.testing.assert_array_equal, *made)


def test_sharding_without_mesh_is_refused():
    head = LMHead(D, V, rngs=nnx.Rngs(0), sharding=SHARDING)
    with pytest.raises(ValueError) as caught:
        head.entropy(problem()[0])
    assert str(caught.value) == (
        "sharding.mesh must be given, because jax.set_mesh has set no mesh"
    )
