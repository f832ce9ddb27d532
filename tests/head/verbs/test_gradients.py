"""Values of `gradient=` that each function takes: the table of docs/heads.md."""

import functools
import re
from pathlib import Path

import flax.nnx
import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.heads import nnx

PAGE = Path(__file__).parents[3] / "docs/heads.md"
H, W = jnp.ones((4, 8), jnp.bfloat16), jnp.cos(jnp.arange(480.0)).reshape(60, 8)
Y, KEY = jnp.arange(4), jax.random.key(0)
TOP = jaxmem.Columns(Y[:, None], jnp.full((4, 1), -1.0))
ARGUMENTS = {
    "logprobs": (H, W, Y), "entropy": (H, W), "token_stats": (H, W, Y),
    "token_loss": (lambda stats: -stats.logprob, H, W, Y),
    "divergence": (H, W, jaxmem.ReverseKL(jaxmem.Teacher(H, W))),
    "divergence_loss": (lambda stats, d: d, H, W, Y, jaxmem.JSD(TOP)),
    "selected_logprobs": (H, W, Y[:, None]), "topk": (H, W, 3),
}  # fmt: skip
TARGETS = {
    "JSD of columns": jaxmem.JSD(TOP),
    "ForwardKL of draws": jaxmem.ForwardKL(jaxmem.Drawn(Y[:, None])),
    "ForwardKL of a teacher": jaxmem.ForwardKL(jaxmem.Teacher(H, W)),
}
GRADIENTS = {
    "None": None,
    "Recompute()": jaxmem.Recompute(),
    "Recompute(blocks=2)": jaxmem.Recompute(blocks=2),
    "Sample(k)": jaxmem.Sample(4),
}


def table():
    """(function, gradient, whether it takes it)."""
    text = PAGE.read_text("utf-8").partition("| function | `None` |")[2]
    head, _, *rows = text.partition("\n\n")[0].splitlines()
    names = ["None", *re.findall("`([^`]+)`", head)]
    for row in rows:
        verb, *cells = (cell.strip(" `") for cell in row.strip("|").split("|"))
        yield from ((verb, n, c) for n, c in zip(names, cells, strict=True))


def test_table_has_every_function_and_choice():
    pairs = {(verb, name) for verb, name, _ in table()}
    assert pairs == {(verb, name) for verb in ARGUMENTS for name in GRADIENTS}


def check(verb, operands, name, takes):
    """The function refuses the gradient by name, or is traced with it."""
    options = {"gradient": GRADIENTS[name]}
    options |= {"key": KEY} if name == "Sample(k)" else {}
    run = functools.partial(getattr(jaxmem, verb), **options)
    if takes == "no":
        with pytest.raises(NotImplementedError, match="must have one block"):
            run(*operands)
        return
    with jaxmem.report() as calls:
        jax.eval_shape(lambda: run(*operands))
    assert calls.calls[0].gradient_samples == (4 if name == "Sample(k)" else None)


@pytest.mark.parametrize("verb, name, takes", list(table()))
def test_functions_take_what_the_table_says(verb, name, takes):
    check(verb, ARGUMENTS[verb], name, takes)


@pytest.mark.parametrize(
    "verb, name, takes", [row for row in table() if row[0].startswith("divergence")]
)
@pytest.mark.parametrize("target", TARGETS)
def test_targets_take_what_the_table_says(target, verb, name, takes):
    check(verb, (*ARGUMENTS[verb][:-1], TARGETS[target]), name, takes)


HEAD = nnx.LMHead(8, 60, rngs=flax.nnx.Rngs(0))


@pytest.mark.parametrize("verb", ARGUMENTS)
def test_methods_of_a_head_take_them_too(verb):
    operands = [x for x in ARGUMENTS[verb] if x is not W]
    with jaxmem.report() as calls:
        run = functools.partial(getattr(HEAD, verb), *operands)
        jax.eval_shape(lambda: run(gradient=jaxmem.Sample(4), key=KEY))
    assert calls.calls[0].gradient_samples == 4


@pytest.mark.parametrize("kind, value", [("Recompute", 0), ("Sample", True)])
def test_numbers_are_checked_where_they_are_given(kind, value):
    with pytest.raises(ValueError, match=rf"{kind}\.\w+ must be .*got {value}"):
        getattr(jaxmem, kind)(value)
