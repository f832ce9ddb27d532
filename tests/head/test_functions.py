"""Every function of the head in one driver: against float64, and what all promise.

`tests/helpers/functions.py` has the table, `tests/helpers/crossing.py` the dimensions.
Each function runs once in float32 by `pytest` alone; `.ci/run` has all pairs of levels.
"""

import dataclasses
import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.head import reference
from tests.helpers import crossing, functions
from tests.helpers.cases import full, slow
from tests.helpers.crossing import Setting, check, masked, problem
from tests.helpers.functions import CASES, FUNCTIONS, VOCAB, N

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")

GRADED = [name for name, function in FUNCTIONS.items() if function.trained]
EACH_GRADED = functions.each_once(GRADED)
# Of what costs programs of its own, the first row of each function in `.ci/run`.
EACH_IN_FULL = [full(x) if isinstance(x, str) else slow(*x.values) for x in CASES]
TOKENWISE = [name for name in FUNCTIONS if "_loss" not in name]  # no sum over tokens
# One program for all operands of a shape: a mask and a temperature are arrays of it.
ANY = Setting(temperature="token")


def unmasked(seed=0, **changes):
    """Operands of `ANY` before its mask."""
    return problem(dataclasses.replace(ANY, mask="none", **changes), seed)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_equals_float64(name):
    """Draw fewer tokens and axes than the program has; the rest is padding."""

    @hypothesis.settings(
        derandomize=True, database=None, deadline=None, max_examples=6,
        phases=[hypothesis.Phase.generate],  # each try may compile again
    )  # fmt: skip
    @hypothesis.given(
        seed=st.integers(0, 2**16), std=st.sampled_from([1.0, 0.0, 2.0]),
        tokens=st.integers(1, N), depth=st.integers(1, ANY.depth),
        warm=st.tuples(*[st.integers(1, 12)] * 2),
    )  # fmt: skip
    def run(seed, std, tokens, depth, warm):
        p = unmasked(seed, std=std)
        for k in ("hidden", "W"):
            p[k][:, depth:] = 0
        masked(p, np.random.default_rng(seed).permutation(N) < tokens)
        p["temperature"] = np.linspace(*warm, N, dtype=np.float32) / 4
        check(name, ANY, p=p)

    run()


@pytest.mark.full
@pytest.mark.parametrize("name, setting", [
    *crossing.cover(FUNCTIONS),
    *(slow(*case) for case in crossing.cover(FUNCTIONS, seed=1)),
], ids=str)  # fmt: skip
def test_pairs_of_options(name, setting):
    check(name, setting)


# A teacher has probability in all columns: tests/head/test_estimates.py.
SAMPLED = [x for x in GRADED if FUNCTIONS[x].samples and "teacher" not in x]
SAMPLED.remove("divergence_loss at another temperature")


@pytest.mark.parametrize("name", [
    name if name in ("selected_logprobs", "divergence_loss JSD columns") else full(name)
    for name in SAMPLED
])  # fmt: skip
def test_sample_of_all_entries_gives_the_gradient(name):
    setting, p = crossing.sampled_whole(ANY)
    check(name, setting, p=p)


def test_every_two_levels_meet_in_a_case():
    settings, met = [*crossing.cover(FUNCTIONS)], set()
    for name, setting in settings:
        row = [("name", name), *((k, getattr(setting, k)) for k in crossing.LEVELS)]
        met |= {frozenset(pair) for pair in itertools.combinations(row, 2)}
    factors = {"name": tuple(FUNCTIONS)} | crossing.LEVELS
    for a, b in itertools.combinations(factors, 2):
        for pair in itertools.product(factors[a], factors[b]):
            if crossing.fit(dict(zip((a, b), pair, strict=True))):
                assert frozenset(zip((a, b), pair, strict=True)) in met


@pytest.mark.parametrize("name", CASES)
def test_reference_equals_float64(name):
    check(name, ANY, reference)


def made_and_gradients(name, p, setting=ANY):
    return crossing.run(jaxmem, name, setting, crossing.trained_of(name, setting), p)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_tokens_masked_give_exactly_nothing(name):
    p = unmasked()
    masked(p, np.zeros(N, bool))
    result, gradients = made_and_gradients(name, p)
    no_id = np.iinfo(np.int32).max if name == "record_entries" else -1
    for x in jax.tree.leaves((result, gradients)):
        integer = jnp.issubdtype(x.dtype, jnp.integer)
        np.testing.assert_array_equal(x, no_id if integer else 0)


def invalid(name):
    """Operands with a label or id that does not exist, at two tokens."""
    p, bad = unmasked(), np.isin(np.arange(N), [2, 7])
    masked(p, np.arange(N) != 5)
    p["labels"] = np.where(p["labels"] < 0, p["support"][:, 0], p["labels"])
    p["log_q"] = np.nan_to_num(p["log_q"], nan=-3)
    p["ids"][p["ids"].max(1) < 0, 0] = 3
    if "support" in name:
        p["support"][[2, 7], 1] = VOCAB, 2**31 - 1  # padding, and beyond
    elif "labels" in name or name in LABELLED:
        p["labels"][[2, 7]] = VOCAB, 2**31 - 1
    else:
        p["ids"][[2, 7], 1] = VOCAB, 2**31 - 1
    return p, bad


LABELLED = (
    "logprobs", "token_stats", "logprobs_from_logits", "token_stats_from_logits",
)  # fmt: skip
OF_IDS = [name for name in TOKENWISE if "columns" in name or "ids" in name]
OF_IDS = [name for name in OF_IDS if name != "sample_ids"]
CHECKED = [
    *LABELLED, *OF_IDS, "selected_logprobs", "support_logprobs",
]  # fmt: skip


@pytest.mark.parametrize("name", CHECKED)
def test_invalid_id_or_label_is_nan_in_its_token(name):
    """Its gradient is not a number where it is used, and nothing where it is not."""
    p, bad = invalid(name)
    (result, gradients), of = made_and_gradients(name, p), FUNCTIONS[name].trained[0]
    first = jax.tree.leaves(result)[0].reshape(N, -1)
    np.testing.assert_array_equal(np.isnan(first).any(1), bad)
    np.testing.assert_array_equal(np.isnan(gradients[of]).any(1), bad)
    p["used"] = np.float32(~bad)
    _, unused = made_and_gradients(name, p)
    assert all(np.isfinite(x).all() for x in unused.values())


@pytest.mark.parametrize("name", TOKENWISE)
def test_nan_row_stays_alone(name):
    p = unmasked()
    masked(p, np.ones(N, bool))
    p["labels"], p["ids"] = np.maximum(p["labels"], 0), np.maximum(p["ids"], 0)
    p["support"] = np.append(p["labels"][:, None], p["support"][:, 1:], 1)
    p["log_q"] = np.nan_to_num(p["log_q"], nan=-3)
    of = "logits" if "logits" in name else "hidden"
    want, exact = made_and_gradients(name, p)
    p[of][5] = np.nan
    result, gradients = made_and_gradients(name, p)
    bad = np.arange(N) == 5
    for a, b in zip(*map(jax.tree.leaves, (result, want)), strict=True):
        np.testing.assert_array_equal(a[~bad], b[~bad])
    if of in gradients:
        np.testing.assert_array_equal(np.isnan(gradients[of]).any(1), bad)
        np.testing.assert_array_equal(gradients[of][~bad], exact[of][~bad])


@pytest.mark.parametrize("name", EACH_IN_FULL)
def test_one_token_and_no_tokens(name):
    for tokens in (), (0, 2):
        check(name, dataclasses.replace(ANY, tokens=tokens, mask="none"))


@pytest.mark.parametrize("name", EACH_IN_FULL)
def test_large_bias_overflows_nowhere(name):
    """e^200 would be infinite, of a row of zeros in the place of a masked token."""
    setting = dataclasses.replace(ANY, softcap=False)
    p = problem(setting)
    p["bias"] += 200
    check(name, setting, p=p)


@pytest.mark.parametrize("name", EACH_IN_FULL)
def test_float64_stays_float64(name):
    with jax.enable_x64(True):
        setting = dataclasses.replace(ANY, dtypes=("float64", "float64"))
        check(name, setting)


def traced(name, p=None, **changes):
    """(h, …) -> the sum of a function's floats, without options; and its operands."""
    p = problem(Setting(mask="none")) if p is None else p

    def total(own, temperature=1.0):
        q = p | own | {"vocab_size": None}
        head = jaxmem.Head(q["W"], q["bias"], layout="vd")
        options = {"temperature": temperature} | changes
        return functions.weighted_sum(FUNCTIONS[name].call(jaxmem, q, head, options))

    return total, {k: jnp.asarray(p[k]) for k in FUNCTIONS[name].trained}


@pytest.mark.parametrize("name", EACH_GRADED)
def test_other_derivatives_are_refused(name):
    total, own = traced(name)
    with pytest.raises(NotImplementedError, match="temperature is not differentiable"):
        jax.eval_shape(jax.grad(total, 1), own, 2.0)
    first = next(iter(own))

    def of_first(x):
        return total(own | {first: x})

    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.eval_shape(jax.grad(lambda x: jax.grad(of_first)(x).sum()), own[first])
    with pytest.raises(TypeError, match="use reverse mode"):
        jax.jvp(of_first, (own[first],), (own[first],))


@pytest.mark.parametrize("name", CASES)
def test_types_and_ranks_are_promoted_explicitly(name):
    dtypes = "bfloat16", "bfloat16"
    total, own = traced(name, problem(Setting(mask="none", dtypes=dtypes)))
    strict, explicit = jax.numpy_dtype_promotion, jax.numpy_rank_promotion
    with strict("strict"), explicit("raise"):
        gradients = jax.eval_shape(jax.grad(total), own)
    assert all(gradients[k].dtype == own[k].dtype for k in own)


TARGETS = [name for name in FUNCTIONS if "divergence" in name and "drawn" not in name]


@pytest.mark.full
@pytest.mark.parametrize("name", [x for x in TARGETS if "draws" not in x])
def test_gradient_of_target_is_zero(name):
    of = ("log_q",) if "columns" in name else ("teacher_hidden", "teacher_W")
    _, gradients = crossing.run(jaxmem, name, ANY, of, problem(ANY))
    assert not any(x.any() for x in gradients.values())


@pytest.mark.parametrize("name", [
    full(x) if isinstance(x, str) else slow(*x.values) for x in EACH_GRADED
])  # fmt: skip
def test_under_checkpoint_and_vmap(name):
    """Two halves of the tokens, of which one after another is computed."""
    p = problem(Setting(mask="none"))
    p = {k: x for k, x in p.items() if k != "bias"}
    trained = [k for k in FUNCTIONS[name].trained if k != "bias"]
    tokens = {k: x for k, x in p.items() if k in functions.OF_TOKENS}
    weights = {k: x for k, x in p.items() if k not in tokens}

    def total(own, tokens):
        q = weights | tokens | own | {"vocab_size": None}
        head = jaxmem.Head(q["W"], layout="vd")
        result = FUNCTIONS[name].call(jaxmem, q, head, {})
        return sum(jnp.cos(x).sum() for x in floats(result)), result

    @jax.jit
    def mapped(own):
        own_tokens = {k: x for k, x in own.items() if k in tokens}
        own_weights = {k: x for k, x in own.items() if k not in tokens}
        halves = jax.tree.map(
            lambda x: x.reshape(2, N // 2, *x.shape[1:]), tokens | own_tokens
        )
        once = jax.checkpoint(lambda rows: total(own_weights, rows)[0])
        return jax.vmap(once)(halves).sum()

    @jax.jit
    def plain(own):
        halves = (
            {k: x[i : i + N // 2] for k, x in (tokens | own).items() if k in tokens}
            for i in (0, N // 2)
        )
        weights = {k: x for k, x in own.items() if k not in tokens}
        return sum(total(weights, half)[0] for half in halves)

    own = {k: jnp.asarray(p[k]) for k in trained}
    got, want = jax.grad(mapped)(own), jax.grad(plain)(own)
    for k in own:
        np.testing.assert_allclose(got[k], want[k], rtol=2e-5, atol=2e-5)


def floats(tree):
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


@pytest.mark.parametrize("name", CASES)
def test_report_names_the_function(name):
    total, own = traced(name, chunk=4)
    with jaxmem.report() as calls:
        jax.eval_shape(total, own)
    (call,) = calls.calls
    assert (call.verb, call.implementation) == (name.split()[0], "xla")
    assert call.chunk == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENWISE)
def test_bits_independent_of_chunk_and_company(name, optimized):
    if jax.default_backend() != "cpu":
        pytest.skip("GPU GEMMs are chosen by the number of rows")
    setting = dataclasses.replace(ANY, tokens=(48,), mask="none", chunk=16)
    p = problem(setting)
    run = functools.partial(crossing.run, jaxmem, name)
    want = run(setting, (), p)[0]
    other = run(dataclasses.replace(setting, chunk=32), (), p)[0]
    order = np.random.default_rng(0).permutation(48)
    tokens = (*functions.OF_TOKENS, "temperature")
    moved = {k: x[order] if k in tokens else x for k, x in p.items()}
    jax.tree.map(np.testing.assert_array_equal, other, want)
    if name not in ("sample_ids", "record_entries"):  # draws depend on the position
        moved = run(setting, (), moved)[0]
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(a, b[order]), moved, want
        )


def test_table_and_reference_have_every_function():
    calls = {name.split()[0] for name in FUNCTIONS}
    of_head = {
        name
        for name, item in vars(jaxmem.head).items()
        if callable(item) and name[0].islower() and name != "report"
    }
    assert calls == of_head
    assert calls <= vars(reference).keys()
