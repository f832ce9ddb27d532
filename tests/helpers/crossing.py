"""The head's functions crossed with types, layouts, masks and options.

A `Setting` chooses one level of each; `check` compares a function in it with float64.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from jaxmem.head import reference
from tests.helpers import functions
from tests.helpers.functions import FUNCTIONS, OF_TOKENS, PADDING, HeadFunction
from tests.helpers.tolerance import EPSILON, STATS_EPSILON

SAMPLE = jaxmem.Sample(6)  # whose gradients are random
EPSILONS = EPSILON | {"float64": 1e-13}
SHORT = "bfloat16", "float16"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One level of each dimension; the defaults are of `pytest` alone.

    Attributes:
        dtypes: of hidden (and a caller's logits, and the teacher), of W and the bias.
        mask: "where" has NaN in the hidden states that it leaves out.
        tokens: their shape.
        std: standard deviation of the logits.
        gradient: the argument; "frozen": only hidden is differentiated.
        size: factors of a loss and of its normalizer; their quotient is undone, as that
            of a loss that is scaled is.
    """

    dtypes: tuple[str, str] = ("float32", "float32")
    layout: str = "dv"
    mask: str = "where"
    tokens: tuple[int, ...] = (12,)
    std: float = 1.0
    bias: bool = True
    softcap: bool = True
    padded: bool = True
    temperature: str = "scalar"
    chunk: int | str | None = 4
    gradient: Any = None
    depth: int = 8
    columns: int = 40
    size: tuple[float, float] = (1.0, 1.0)

    def takes(self, function: HeadFunction) -> bool:
        """False if the function has not this kind of gradient."""
        if self.gradient in (None, "frozen"):
            return True
        has_blocks = getattr(self.gradient, "blocks", 1) == 1 or function.blocks
        return type(self.gradient) in function.gradients and has_blocks


# The first level of each is the default; pairs of levels are covered by `.ci/run`.
LEVELS = {
    "dtypes": (
        ("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"),
        ("bfloat16", "float32"), ("float32", "bfloat16"),
    ),
    "layout": ("dv", "vd"),
    "mask": ("where", "none"),
    "tokens": ((12,), (2, 3, 2)),
    "std": (1.0, 0.0, 15.0),
    "bias": (True, False),
    "softcap": (True, False),
    "padded": (True, False),
    "temperature": ("scalar", "token", "none"),
    "chunk": (4, 5, None, "auto"),
    "gradient": (None, "frozen", jaxmem.Recompute(), jaxmem.Recompute(2), SAMPLE),
    "depth": (8, 33),
    "columns": (40, 300),
    "size": ((1.0, 1.0), (1e30, 1e30), (1.0, 2.0**12)),
}  # fmt: skip


def fit(levels: dict) -> bool:
    """False if a function lacks the kind of gradient, or W no blocks of columns.

    Of W in float32, or of few columns, all blocks are one.
    """
    name, gradient = levels.get("name"), levels.get("gradient")
    if getattr(gradient, "blocks", 1) > 1:
        (_, of_W), columns = levels.get("dtypes", ("", "")), levels.get("columns", 300)
        if of_W == "float32" or columns <= 256:
            return False
    return name is None or Setting(gradient=gradient).takes(FUNCTIONS[name])


def cover(names, seed=0, levels=LEVELS):
    """Few (name, Setting) in which each two levels meet, and each name and level.

    Greedy: a row starts with a pair that is missing, and takes for each other dimension
    the level that adds the most pairs.
    """
    rng, factors = np.random.default_rng(seed), {"name": tuple(names)} | levels
    every = [(key, x) for key, values in factors.items() for x in values]
    number = {pair: i for i, pair in enumerate(every)}
    of_key = {key: [number[key, x] for x in values] for key, values in factors.items()}
    is_gradient, is_name = (
        np.isin(np.arange(len(every)), of_key[key]) for key in ("gradient", "name")
    )
    allowed = np.array([[fit(dict((a, b))) for a in every] for b in every])
    for numbers in of_key.values():
        allowed[np.ix_(numbers, numbers)] = False
    allowed[is_gradient & ~(allowed & is_name).any(1)] = False
    missing = np.triu(allowed & allowed.T)
    missing |= missing.T

    while missing.any():
        row = [int(i) for i in np.unravel_index(missing.argmax(), missing.shape)]
        for key in ("name", *rng.permutation(list(levels))):
            if not set(row) & set(of_key[key]):
                fitting = [i for i in of_key[key] if allowed[i, row].all()]
                gain = missing[fitting][:, row].sum(1) + rng.random(len(fitting))
                row.append(fitting[gain.argmax()])
        missing[np.ix_(row, row)] = False
        made = dict(every[i] for i in row)
        yield made.pop("name"), Setting(**made)


def problem(setting: Setting, seed=0) -> dict[str, np.ndarray]:
    """Operands in the setting's types, with its mask; tokens are flat."""
    n = math.prod(setting.tokens)
    p = functions.make(seed, n, setting.depth, setting.columns, setting.std)
    own, of_W = setting.dtypes
    for k in ("hidden", "logits", "teacher_hidden", "teacher_W"):
        p[k] = np.asarray(p[k], jnp.dtype(own))
    for k in ("W", "bias"):
        p[k] = np.asarray(p[k], jnp.dtype(of_W))
    if not setting.bias:
        del p["bias"]
    p["used"] = np.ones(n, np.float32)  # times the cotangents of a token
    rng = np.random.default_rng(seed + 1)
    if setting.mask == "where":
        masked(p, rng.random(n) < 0.7)
    if setting.temperature == "token":
        p["temperature"] = np.linspace(0.5, 2, n, dtype=np.float32)
    return p


def masked(p, mask):
    """Set a mask, and NaN where it leaves a token out."""
    p["where"] = mask
    for k in ("hidden", "teacher_hidden", "logits", "log_q", "advantages"):
        p[k][~mask] = np.nan


def sampled_whole(setting: Setting) -> tuple[Setting, dict[str, np.ndarray]]:
    """A setting whose sampled gradient is the exact one, and its operands.

    A fourth of the columns have all of the probability, each more than a slot's share.
    """
    slots = jaxmem.Sample(setting.columns - PADDING - 1)
    setting = dataclasses.replace(setting, gradient=slots, std=0.1, softcap=False)
    p = problem(setting)
    is_live = np.arange(setting.columns) % 4 == 0
    p["bias"] = np.where(is_live, 0, -30).astype(p["bias"].dtype)
    return setting, p


def facts_of(setting: Setting) -> dict[str, Any]:
    """The head's description and scalar options."""
    return {
        "layout": setting.layout,
        "softcap": 2.0 * max(1.0, setting.std) if setting.softcap else None,
        "vocab_size": setting.columns - PADDING if setting.padded else None,
        "temperature": 0.7 if setting.temperature == "scalar" else 1.0,
    }


@functools.partial(jax.jit, static_argnames=("module", "name", "setting", "trained"))
def run(module, name, setting, trained, p):
    """(result, gradients by name of its weighted sum)."""
    function, facts = FUNCTIONS[name], facts_of(setting)

    def call(own):
        q = p | own
        q |= {
            k: x.reshape((*setting.tokens, *x.shape[1:]))
            for k, x in q.items()
            if k in (*OF_TOKENS, "where", "temperature")
        }
        q |= {"vocab_size": facts["vocab_size"], "size": setting.size}
        W = q["W"] if facts["layout"] == "vd" else q["W"].T
        description = facts["softcap"], facts["vocab_size"], facts["layout"]
        head = jaxmem.Head(W, q.get("bias"), *description)
        options = {"temperature": q.get("temperature", facts["temperature"])}
        options |= {"where": q["where"]} if "where" in q else {}
        if module is not reference:
            options |= {"chunk": setting.chunk} if "chunk" in vars(setting) else {}
            if setting.gradient not in (None, "frozen"):
                options["gradient"] = setting.gradient
            if isinstance(setting.gradient, jaxmem.Sample):
                options["key"] = q.get("key", functions.KEY)
        result = function.call(module, q, head, options)
        return functions.weighted_sum(result, p["used"]), result

    own = {k: p[k] for k in trained}
    if not own:
        return call({})[1], {}
    gradients, result = jax.grad(call, has_aux=True)(own)
    return result, gradients


def trained_of(name, setting):
    """The operands that are differentiated in the setting."""
    names = FUNCTIONS[name].trained
    names = [k for k in names if k != "bias" or setting.bias]
    if setting.gradient == "frozen":
        names = [k for k in names if k not in ("W", "bias")]
    return tuple(names)


def exact(name, setting, p, result):
    """(result, gradients) in float64; W is rounded as the function rounds it."""
    facts = facts_of(setting)
    n = math.prod(setting.tokens)
    scaling = {
        "softcap": facts["softcap"],
        "vocab_size": facts["vocab_size"],
        "temperature": p.get("temperature", facts["temperature"]),
    }
    q = {"bias": 0.0} | p | {"W": p["W"].astype(p["hidden"].dtype), "result": result}
    on = p.get("where", np.ones(n, bool))
    made, pull = FUNCTIONS[name].exact(q, scaling, on)
    made = jax.tree.map(np.asarray, made)
    shaped = jax.tree.map(lambda x: _shaped(x, setting), made)
    g = jax.tree.map(
        lambda g, x: g.reshape(x.shape), functions.cotangents(shaped), made
    )
    return shaped, pull(jax.tree.map(np.float64, g))


def _shaped(x, setting):
    """With the tokens' shape; a loss has none."""
    return x.reshape((*setting.tokens, *x.shape[1:])) if x.ndim else x


def without_nan(p):
    """The operands with 0 where one is not a number, but for hidden's and logits'."""
    names = ("teacher_hidden", "log_q", "advantages")
    return p | {k: np.where(np.isnan(p[k]), p[k].dtype.type(0), p[k]) for k in names}


def check(name, setting=Setting(), module=jaxmem, seed=0, p=None):
    """Compare results and gradients of a function with float64.

    Each error is at most twice that of the materialised computation in the same type,
    plus an epsilon of the type.
    """
    if "columns" in name:  # whose probabilities the reference divides by their sum
        setting = dataclasses.replace(setting, std=min(setting.std, 6.0))
    p = problem(setting, seed) if p is None else p
    trained, numbers = trained_of(name, setting), without_nan(p)
    operands = numbers if module is reference else p
    made, gradients = run(module, name, setting, trained, operands)
    want, exact_gradients = exact(name, setting, p, made)
    materialised = functools.cache(
        lambda: run(reference, name, setting, trained, numbers)
    )
    assert jax.tree.structure(made) == jax.tree.structure(want)
    leaves = jax.tree.leaves_with_path(made)
    of_statistics = 1e-13 if setting.dtypes[0] == "float64" else STATS_EPSILON
    for i, ((path, a), b) in enumerate(zip(leaves, jax.tree.leaves(want), strict=True)):
        what = name + jax.tree_util.keystr(path)
        assert a.shape == b.shape, what
        if not jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_array_equal(a, b, what)
            continue
        assert a.dtype == jnp.promote_types(setting.dtypes[0], jnp.float32), what
        near = lambda: jax.tree.leaves(materialised()[0])[i]  # noqa: B023, E731
        assert_as_good(a, near, b, of_statistics, what)
    is_sample = setting.gradient == SAMPLE
    for k, a in gradients.items():
        assert (a.shape, a.dtype) == (p[k].shape, p[k].dtype), k
        near = lambda: materialised()[1][k]  # noqa: B023, E731
        epsilon = 2 * max(EPSILONS[x] for x in (a.dtype.name, setting.dtypes[0]))
        if not is_sample:
            what, want = f"{name}, gradient by {k}", exact_gradients[k]
            epsilon += rounding_of_terms(exact_gradients, k, setting)
            assert_as_good(a, near, want, epsilon, what)
        assert np.isfinite(a).all(), k
        if k in OF_TOKENS and "where" in p:
            assert not np.asarray(a)[~p["where"]].any(), k
        if k == "W" and setting.padded:
            assert not np.asarray(a)[setting.columns - PADDING :].any()


def rounding_of_terms(gradients, k, setting):
    """Relative error of a gradient whose terms are rounded to a type of 16 bits."""
    if k not in gradients.get("terms", ()) or setting.dtypes[0] not in SHORT:
        return 0.0
    largest = gradients["terms"][k].max(initial=0)
    return EPSILONS[setting.dtypes[0]] * largest / size_of(gradients[k])


def size_of(x):
    return max(1.0, np.abs(x).max(initial=0))


def assert_as_good(got, near, want, epsilon, what):
    """Compare relative to the largest; `near` is called above the epsilon."""
    scale = size_of(want)
    ours = _distance(got, want) / scale
    if ours <= epsilon:
        return
    theirs = _distance(near(), want) / scale
    assert ours <= 2 * theirs + epsilon, (
        f"{what}: {ours:.2e}, materialised {theirs:.2e}"
    )


def _distance(got, want):
    return np.abs(np.asarray(got).astype(np.float64) - want).max(initial=0)
