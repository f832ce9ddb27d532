"""The NNX head: nnx.Linear's checkpoints and numbers, one tied parameter, no logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jaxmem
from jaxmem.heads.nnx import LMHead
from tests.helpers import functions, oracle
from tests.helpers.cases import slow

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")

D, V = 8, 37
BATCH = (3, 5)
LABELS = np.random.default_rng(0).integers(0, V, BATCH, dtype=np.int32)
LABELS[0, :2] = -1
KEEP = np.random.default_rng(1).random(BATCH) < 0.7


def hidden_states(dtype=jnp.float32, batch=BATCH):
    return jax.random.normal(jax.random.key(0), (*batch, D), dtype)


def make_head(**options):
    return LMHead(D, V, rngs=nnx.Rngs(params=1), **options)


def f64(x):
    return np.asarray(x).astype(np.float64)


def exact(hidden, W, labels=LABELS, cotangents=None, **options):
    """Float64 outputs, shaped as labels, and (dhidden, dW, dbias); W is [V, D]."""
    cotangents = {k: np.ravel(g) for k, g in (cotangents or {"logprob": 0.0}).items()}
    flat = f64(hidden).reshape(-1, np.shape(hidden)[-1])
    if "on" in options:
        options["on"] = np.ravel(options["on"])
    outputs, gradients = oracle.head(flat, W, np.ravel(labels), cotangents, **options)
    return {k: v.reshape(labels.shape) for k, v in outputs.items()}, gradients


def assert_trees(compare, left, right, **tolerance):
    left, right = (jax.tree.leaves_with_path(tree) for tree in (left, right))
    assert [path for path, _ in left] == [path for path, _ in right]
    for (_, a), (_, b) in zip(left, right, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        compare(np.asarray(a), np.asarray(b), **tolerance)


# Own weights: in the place of nnx.Linear


@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("use_bias", [None, True, False])
def test_same_initial_state_as_linear(use_bias, param_dtype):
    given = {} if use_bias is None else {"use_bias": use_bias}
    made = [
        nnx.state(layer(D, V, param_dtype=param_dtype, rngs=nnx.Rngs(7), **given))
        for layer in (nnx.Linear, LMHead)
    ]
    assert_trees(np.testing.assert_array_equal, *made)


@pytest.mark.parametrize("dtype, param_dtype, input_dtype", [
    (None, jnp.float32, jnp.float32), (None, jnp.float32, jnp.bfloat16),
    (None, jnp.bfloat16, jnp.bfloat16), (jnp.bfloat16, jnp.float32, jnp.float32),
    (jnp.float32, jnp.bfloat16, jnp.bfloat16),
])  # fmt: skip
def test_same_logits_as_linear(dtype, param_dtype, input_dtype):
    options = dict(
        dtype=dtype, param_dtype=param_dtype, bias_init=nnx.initializers.normal(1.0)
    )
    linear = nnx.Linear(D, V, rngs=nnx.Rngs(7), **options)
    head = LMHead(D, V, rngs=nnx.Rngs(7), **options)
    hidden = hidden_states(input_dtype)
    expected, got = linear(hidden), head(hidden)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("source, target", [(nnx.Linear, LMHead), (LMHead, nnx.Linear)])
def test_orbax_checkpoint_loads_into_either_head(tmp_path, source, target):
    saved = source(D, V, rngs=nnx.Rngs(7))
    loaded = target(D, V, rngs=nnx.Rngs(8))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "head", nnx.state(saved))
        checkpointer.wait_until_finished()
        state = checkpointer.restore(tmp_path / "head", nnx.state(loaded))
    nnx.update(loaded, state)
    np.testing.assert_array_equal(loaded(hidden_states()), saved(hidden_states()))


def test_pure_state_dict_round_trip():
    linear, head = nnx.Linear(D, V, rngs=nnx.Rngs(7)), make_head()
    state = nnx.state(head)
    nnx.replace_by_pure_dict(state, nnx.to_pure_dict(nnx.state(linear)))
    nnx.update(head, state)
    np.testing.assert_array_equal(head(hidden_states()), linear(hidden_states()))


# Logits and the loss against float64


@pytest.mark.parametrize("softcap", [slow(None), 0.7])
def test_logits_equal_float64(softcap):
    head = make_head(softcap=softcap, bias_init=nnx.initializers.normal(1.0))
    hidden = hidden_states()
    z = f64(hidden) @ f64(head.kernel[...]) + f64(head.bias[...])
    z = z if softcap is None else softcap * np.tanh(z / softcap)
    np.testing.assert_allclose(head(hidden), z, atol=2e-6)


def test_logits_of_padding_exclude_it():
    padded = make_head(vocab_size=V - 5, softcap=2.0)
    plain = LMHead(D, V - 5, softcap=2.0, rngs=nnx.Rngs(0))
    plain.kernel[...] = padded.kernel[:, : V - 5]
    logits = padded(hidden_states())
    np.testing.assert_array_equal(logits[..., V - 5 :], -np.inf)
    np.testing.assert_allclose(logits[..., : V - 5], plain(hidden_states()), rtol=1e-5)


@pytest.mark.parametrize("normalizer, z_loss, where", [
    (None, 0.0, None), (5.0, 0.0, KEEP[:1]), (11, 0.1, None), slow(None, 0.1, KEEP),
    slow(None, 0.1, None), slow(None, 0.0, KEEP), slow(5.0, 0.1, KEEP),
    slow(11, 0.0, KEEP[:1]),
])  # fmt: skip
def test_loss_against_float64(normalizer, z_loss, where):
    bias_init = nnx.initializers.normal(1.0)
    head, hidden = make_head(chunk=4, bias_init=bias_init), hidden_states()
    active = (LABELS >= 0) & (True if where is None else where)
    expected, _ = exact(hidden, head.kernel[...].T, on=active, bias=head.bias[...])
    total = np.sum(z_loss * expected["logsumexp"] ** 2 - expected["logprob"])
    expected = total / (active.sum() if normalizer is None else normalizer)
    got = head.loss(hidden, LABELS, where, normalizer, z_loss)
    assert (got.shape, got.dtype) == ((), jnp.float32)
    np.testing.assert_allclose(got, expected, rtol=2e-6)


@pytest.mark.parametrize("z_loss", [slow(0.0), 0.3, jnp.float32(0.3)])
def test_loss_gradients_against_float64(z_loss):
    head, hidden = make_head(chunk=4), hidden_states()
    loss = nnx.jit(
        nnx.grad(lambda h, x, z: h.loss(x, LABELS, z_loss=z), argnums=(0, 1))
    )
    grads, dhidden = loss(head, hidden, z_loss)
    W, active = head.kernel[...].T, np.sum(LABELS >= 0)
    outputs, _ = exact(hidden, W)
    cotangents = {
        "logprob": np.full(BATCH, -1 / active),
        "logsumexp": 2 * float(z_loss) * outputs["logsumexp"] / active,
    }
    _, (expected_dhidden, dW, dbias) = exact(hidden, W, cotangents=cotangents)
    np.testing.assert_allclose(dhidden.reshape(-1, D), expected_dhidden, atol=1e-6)
    np.testing.assert_allclose(grads.kernel[...], dW.T, atol=1e-6)
    np.testing.assert_allclose(grads.bias[...], dbias, atol=1e-6)


@pytest.mark.parametrize("normalizer, z_loss", [(None, 0.0), (jnp.zeros(()), 0.1)])
def test_all_masked_is_zero_with_zero_gradients(normalizer, z_loss):
    hidden, labels = jnp.full((*BATCH, D), jnp.nan), np.full(BATCH, -100, np.int32)

    def loss(head, hidden):
        return head.loss(hidden, labels, normalizer=normalizer, z_loss=z_loss)

    value_and_grad = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))
    value, grads = value_and_grad(make_head(), hidden)
    assert value == 0
    assert len(jax.tree.leaves(grads)) == 3
    for gradient in jax.tree.leaves(grads):
        np.testing.assert_array_equal(gradient, 0)


# Types


def program(call):
    """The program of a call of hidden states."""
    return jax.jit(call).lower(hidden_states()).as_text()


def operands():
    """Operands of every function, with the tokens' shape."""
    p = functions.make(0, LABELS.size, D, V)
    of_tokens = {k: p[k].reshape(*BATCH, *p[k].shape[1:]) for k in functions.OF_TOKENS}
    return p | of_tokens | {"vocab_size": V - 3}


OPTIONS = {"where": KEEP, "temperature": 0.7}


@pytest.mark.parametrize("name", [slow("divergence"), "divergence_loss"])
def test_divergences_of_two_heads(name):
    """Each head has its own width, layout, bias, softcap and padding."""
    embed, wide = nnx.Embed(V + 5, 2 * D, rngs=nnx.Rngs(1)), 2 * D
    student, p = make_head(chunk=4, vocab_size=V - 3), operands()
    teacher = LMHead(
        tied_to=embed, softcap=0.7, use_bias=True, vocab_size=V - 3, rngs=nnx.Rngs(2)
    )
    states = np.linspace(-1, 1, LABELS.size * wide, dtype=np.float32)
    states = states.reshape(*BATCH, wide)
    own = {"vocab_size": V - 3}
    plain = jaxmem.Head(student.kernel[...], student.bias[...], layout="dv", **own)
    other = jaxmem.Head(
        embed.embedding[...], teacher.bias[...], softcap=0.7, layout="vd", **own
    )

    def call(module, head, of, options):
        target = jaxmem.ReverseKL(of)
        if name == "divergence":
            return lambda h: module.divergence(h, head, target, **options)
        more = p["labels"], target, p["advantages"]
        loss = functions.mixed_loss
        return lambda h: module.divergence_loss(loss, h, head, *more, **options)

    methods = functions.Methods(student)
    got = program(call(methods, None, teacher.teacher(states), OPTIONS))
    function = call(
        jaxmem, plain, jaxmem.Teacher(states, other), OPTIONS | {"chunk": 4}
    )
    assert got == program(function)


def test_divergence_refuses_other_vocabulary():
    heads = [LMHead(D, V, rngs=nnx.Rngs(0), vocab_size=V - i) for i in (1, 2)]
    with pytest.raises(ValueError, match=f"same vocabulary, got {V - 1} and {V - 2}"):
        target = jaxmem.ReverseKL(heads[1].teacher(hidden_states()))
        heads[0].divergence(hidden_states(), target)


def test_gradient_in_parameter_type_with_float32_sums():
    head = make_head(dtype=jnp.bfloat16, param_dtype=jnp.float32)
    hidden = hidden_states()
    assert head(hidden).dtype == jnp.bfloat16
    grads = nnx.jit(nnx.grad(lambda head: head.loss(hidden, LABELS)))(head)
    assert grads.kernel[...].dtype == grads.bias[...].dtype == jnp.float32
    rounded = grads.kernel[...].astype(jnp.bfloat16).astype(jnp.float32)
    assert np.mean(np.asarray(grads.kernel[...] != rounded)) > 0.5


def test_verbs_compute_in_dtype():
    head = make_head(dtype=jnp.bfloat16)
    expected = jaxmem.logprobs(
        hidden_states().astype(jnp.bfloat16), head.kernel[...], LABELS
    )
    got = head.logprobs(hidden_states(), LABELS)
    np.testing.assert_array_equal(got, expected)


def test_verbs_promote_like_linear_without_dtype():
    head, hidden = make_head(), hidden_states(jnp.bfloat16)
    expected = head.logprobs(hidden.astype(jnp.float32), LABELS)
    np.testing.assert_array_equal(head.logprobs(hidden, LABELS), expected)


# Tied weights


class Tied(nnx.Module):
    def __init__(self, **options):
        self.embed = nnx.Embed(V, D, rngs=nnx.Rngs(3))
        self.head = LMHead(tied_to=self.embed, chunk=4, **options)

    def loss(self, tokens, labels):
        return self.head.loss(self.embed(tokens), labels)


def test_tied_embedding_sums_both_gradients():
    model, tokens = Tied(), np.maximum(LABELS[:, ::-1], 0)
    grads = nnx.jit(nnx.grad(lambda model: model.loss(tokens, LABELS)))(model)
    ((path, gradient),) = nnx.to_flat_state(grads)
    assert path == ("embed", "embedding")

    E = f64(model.embed.embedding[...])
    cotangents = {"logprob": np.full(BATCH, -1 / np.sum(LABELS >= 0))}
    _, (dhidden, by_head, _) = exact(E[tokens], E, cotangents=cotangents)
    by_lookup = np.zeros_like(E)
    np.add.at(by_lookup, tokens.ravel(), dhidden)
    assert min(np.abs(by_head).max(), np.abs(by_lookup).max()) > 1e-2
    np.testing.assert_allclose(gradient[...], by_head + by_lookup, atol=2e-6)


def test_tied_embedding_logits_equal_attend():
    model = Tied(dtype=jnp.bfloat16)
    plain = nnx.Embed(V, D, dtype=jnp.bfloat16, rngs=nnx.Rngs(3))
    expected = plain.attend(hidden_states())
    np.testing.assert_allclose(
        f64(model.head(hidden_states())), f64(expected), atol=0.02
    )
    head = LMHead(tied_to=plain)
    assert head(hidden_states()).dtype == expected.dtype == jnp.bfloat16
    assert not hasattr(head, "kernel")


@pytest.mark.parametrize("use_bias", [None, True, False])
def test_tied_linear_reads_its_kernel_and_bias(use_bias):
    init = nnx.initializers.normal(1.0)
    linear = nnx.Linear(D, V, bias_init=init, rngs=nnx.Rngs(0))
    head = LMHead(tied_to=linear, use_bias=use_bias, rngs=nnx.Rngs(1))
    bias = {None: linear.bias[...], True: 0, False: 0}[use_bias]
    expected = hidden_states() @ linear.kernel[...] + bias
    np.testing.assert_allclose(head(hidden_states()), expected, atol=1e-5)
    linear.kernel[...] = linear.kernel[...] * 2
    expected = hidden_states() @ linear.kernel[...] + bias
    np.testing.assert_allclose(head(hidden_states()), expected, atol=1e-5)


@pytest.mark.parametrize("shape", [slow((V, D)), (D, V)])
def test_tied_parameter_of_either_layout(shape):
    parameter = nnx.Param(jax.random.normal(jax.random.key(1), shape))
    head = LMHead(D, V, tied_to=parameter)
    W = parameter[...].T if shape == (V, D) else parameter[...]
    np.testing.assert_allclose(
        head(hidden_states()), hidden_states() @ W, rtol=1e-5, atol=1e-5
    )
    grads = nnx.grad(lambda head: head.loss(hidden_states(), LABELS))(head)
    ((_, gradient),) = nnx.to_flat_state(grads)
    assert gradient[...].shape == shape


# Transformations


@functools.cache
def plain_gradients():
    loss = nnx.grad(lambda head, hidden: head.loss(hidden, LABELS))
    return nnx.to_pure_dict(nnx.jit(loss)(make_head(chunk=4), hidden_states()))


def by_remat(head, hidden):
    loss = nnx.remat(lambda head, hidden: head.loss(hidden, LABELS))
    return nnx.jit(nnx.grad(lambda head: loss(head, hidden)))(head)


def by_checkpoint(head, hidden):
    graph, state = nnx.split(head)
    loss = jax.checkpoint(lambda state: nnx.merge(graph, state).loss(hidden, LABELS))
    return jax.jit(jax.grad(loss))(state)


def by_nnx_scan(head, hidden):
    n_active = np.sum(LABELS >= 0)

    @nnx.scan(in_axes=(nnx.Carry, None, 0, 0), out_axes=nnx.Carry)
    def step(total, head, hidden, labels):
        return total + head.loss(hidden, labels, normalizer=n_active)

    total = jnp.zeros(())
    loss = nnx.grad(lambda head: step(total, head, hidden, jnp.asarray(LABELS)))
    return nnx.jit(loss)(head)


def by_remat_inside_scan(head, hidden):
    n_active = np.sum(LABELS >= 0)
    graph, state = nnx.split(head)

    @jax.checkpoint
    def loss(state, row):
        return nnx.merge(graph, state).loss(*row, normalizer=n_active)

    def total(state):
        rows = (hidden, jnp.asarray(LABELS))
        add = lambda total, row: (total + loss(state, row), None)  # noqa: E731
        return jax.lax.scan(add, jnp.zeros(()), rows)[0]

    return jax.jit(jax.grad(total))(state)


@pytest.mark.parametrize(
    "gradients",
    [by_remat_inside_scan, *map(slow, [by_remat, by_checkpoint, by_nnx_scan])],
)
def test_transformed_gradients(gradients):
    head, hidden = make_head(chunk=4), hidden_states()
    got = nnx.to_pure_dict(gradients(head, hidden))
    assert_trees(np.testing.assert_allclose, got, plain_gradients(), atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_sharding_metadata_is_kept_and_harmless():
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("tp",), axis_types, devices=jax.devices()[:2])
    init = nnx.with_partitioning(nnx.initializers.normal(1.0), (None, "tp"))
    with jax.set_mesh(mesh):
        head = LMHead(D, V - 1, kernel_init=init, rngs=nnx.Rngs(0))
        specs = nnx.get_partition_spec(nnx.state(head))
        assert head.kernel[...].sharding.spec == jax.P(None, "tp")
        assert specs["kernel"].get_raw_value() == jax.P(None, "tp")
        labels = np.minimum(LABELS, V - 2)
        loss = nnx.jit(nnx.value_and_grad(lambda head, h: head.loss(h, labels)))
        value, grads = loss(head, hidden_states())
    W, cotangents = head.kernel[...].T, {"logprob": np.full(BATCH, -1 / 13)}
    assert np.sum(labels >= 0) == 13
    outputs, (_, dW, _) = exact(hidden_states(), W, labels, cotangents)
    np.testing.assert_allclose(value, -outputs["logprob"].sum() / 13, rtol=1e-6)
    np.testing.assert_allclose(grads.kernel[...], dW.T, atol=1e-6)


# Memory


@pytest.mark.slow
def test_compiled_loss_gradient_holds_no_logits():
    tokens, columns, chunk = 4096, 8192, 32
    embed = nnx.Embed(columns, D, rngs=nnx.Rngs(0))
    head = LMHead(tied_to=embed, chunk=chunk)
    graph, state = nnx.split(head)

    def lean(state, hidden, labels):
        return nnx.merge(graph, state).loss(hidden, labels, z_loss=1e-4)

    def materialised(state, hidden, labels):
        logits = nnx.merge(graph, state)(hidden)
        return -jaxmem.logprobs_from_logits(logits, labels).sum()

    hidden = jax.ShapeDtypeStruct((tokens, D), jnp.float32)
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    temp = {}
    for loss in (lean, materialised):
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(state, hidden, labels)
        compiled = compiled.compile()
        temp[loss.__name__] = compiled.memory_analysis().temp_size_in_bytes
        assert (f"[{tokens},{columns}]" in compiled.as_text()) == (loss is materialised)
    logits = 4 * tokens * columns
    assert temp["materialised"] > logits
    assert temp["lean"] < logits / 16


# Errors


def lora_linear():
    return nnx.LoRALinear(D, V, lora_rank=2, rngs=nnx.Rngs(0))


def precise_linear():
    return nnx.Linear(D, V, precision="highest", rngs=nnx.Rngs(0))


@pytest.mark.parametrize("error, match, make", [
    (TypeError, "in_features must be", lambda: LMHead(rngs=nnx.Rngs(0))),
    (TypeError, "out_features must be", lambda: LMHead(D, 0, rngs=nnx.Rngs(0))),
    (TypeError, "rngs must be given", lambda: LMHead(D, V)),
    (TypeError, "tied_to must be an nnx.Embed", lambda: LMHead(tied_to=3)),
    (TypeError, "got LoRALinear", lambda: LMHead(tied_to=lora_linear())),
    (NotImplementedError, "precision='highest'",
     lambda: LMHead(tied_to=precise_linear())),
    (ValueError, f"out_features must be {V}, as in tied_to, got 3",
     lambda: LMHead(D, 3, tied_to=nnx.Embed(V, D, rngs=nnx.Rngs(0)))),
    (ValueError, "tied_to must be a parameter of shape",
     lambda: LMHead(D, V, tied_to=nnx.Param(jnp.zeros((D, D))))),
    (TypeError, "dtype must be a floating", lambda: make_head(dtype=jnp.int32)),
    (ValueError, "softcap must be positive", lambda: make_head(softcap=-1.0)),
    (ValueError, "chunk must be a positive", lambda: make_head(chunk=0)),
    (TypeError, "gradient must be None", lambda: make_head(gradient=0)),
    (ValueError, "vocab_size must be", lambda: make_head(vocab_size=V + 1)),
    (ValueError, "implementation must be", lambda: make_head(implementation="?")),
])  # fmt: skip
def test_bad_construction(error, match, make):
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize("error, match, change", [
    (TypeError, "hidden must be floating", dict(hidden=np.ones((*BATCH, D), int))),
    (ValueError, rf"hidden must be \[..., {D}\]", dict(hidden=jnp.ones((2, D + 1)))),
    (TypeError, "labels must be integers", dict(labels=LABELS.astype(np.float32))),
    (ValueError, "labels must have one entry", dict(labels=LABELS[0])),
    (TypeError, "where must be boolean", dict(where=np.ones(BATCH, np.int32))),
    (ValueError, "normalizer must not be negative", dict(normalizer=-1)),
    (ValueError, "normalizer must be a scalar", dict(normalizer=np.ones(2))),
    (ValueError, "z_loss must not be negative", dict(z_loss=-0.1)),
    (ValueError, "z_loss must be a scalar", dict(z_loss=np.ones(BATCH))),
])  # fmt: skip
def test_bad_call(error, match, change):
    given = {"hidden": hidden_states(), "labels": LABELS} | change
    with pytest.raises(error, match=match):
        make_head().loss(**given)


@pytest.mark.parametrize(
    "verb", ["logprobs", *map(slow, ["token_stats", "loss", "entropy"])]
)
def test_gradient_blocks_reach_the_verbs(verb):
    head = make_head(gradient=jaxmem.Recompute(2))
    given = () if verb == "entropy" else (LABELS,)
    with pytest.raises(ValueError, match="key must not be given without"):
        getattr(head, verb)(hidden_states(), *given, key=jax.random.key(0))
    with pytest.raises(ValueError, match="k from 1 to .*got 999"):
        getattr(head, verb)(hidden_states(), *given, gradient=jaxmem.Sample(999))
    made = getattr(head, verb)(hidden_states(), *given)
    assert_trees(
        np.testing.assert_array_equal,
        made,
        getattr(make_head(), verb)(hidden_states(), *given),
    )
