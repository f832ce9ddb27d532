"""Divergences by name, for tests with dictionaries of options of both heads."""

import dataclasses
import functools

import jaxmem
from jaxmem.head.maths.head import as_head
from tests.helpers.described import FIELDS

KINDS = {
    "reverse_kl": jaxmem.ReverseKL,
    "forward_kl": jaxmem.ForwardKL,
    "jsd": jaxmem.JSD,
}


def kind_of(name, of):
    """The kind of a target; "jsd 0.1" has a beta."""
    name, _, beta = name.partition(" ")
    return KINDS[name](of, *map(float, beta.split()))


def heads_of(name, W, teacher_hidden, teacher_W, options):
    """(the student's head, the target); their fields leave the options.

    A teacher has the student's softcap and vocab_size, if none of its own is given.
    """
    own = {k: options.pop(k) for k in FIELDS if k in options}
    other = {k: own[k] for k in ("softcap", "vocab_size") if k in own}
    named = {k: f"teacher_{k}" for k in FIELDS}
    other |= {k: options.pop(v) for k, v in named.items() if v in options}
    temperature = options.pop("teacher_temperature", None)
    head = dataclasses.replace(as_head(teacher_W), **other)
    teacher = jaxmem.Teacher(teacher_hidden, head, temperature)
    return dataclasses.replace(as_head(W), **own), kind_of(name, teacher)


def of_two_heads(name, verb=jaxmem.divergence):
    """(hidden, W, teacher_hidden, teacher_W, chunk, …) -> the divergence by name."""

    def run(hidden, W, teacher_hidden, teacher_W, chunk=1024, **options):
        head, target = heads_of(name, W, teacher_hidden, teacher_W, options)
        return verb(hidden, head, target, chunk, **options)

    return run


def loss_of_two_heads(name, loss_fn, verb=None):
    """(hidden, W, labels, teacher_hidden, teacher_W, *per_token, …) -> the loss."""
    verb = verb or functools.partial(jaxmem.divergence_loss, loss_fn)

    def run(hidden, W, labels, teacher_hidden, teacher_W, *per_token, **options):
        head, target = heads_of(name, W, teacher_hidden, teacher_W, options)
        return verb(hidden, head, labels, target, *per_token, **options)

    return run


def target_of(name, ids, logprobs, tail=True):
    """The target of given columns, or of drawn ids where logprobs are None."""
    drawn = logprobs is None
    of = jaxmem.Drawn(ids) if drawn else jaxmem.Columns(ids, logprobs, tail)
    return kind_of(name, of)


def of_columns(name, verb=jaxmem.divergence):
    """(hidden, W, ids, logprobs, chunk, tail, …) -> the divergence by name."""

    def run(hidden, W, ids, logprobs, chunk=1024, tail=True, **options):
        own = {k: options.pop(k) for k in FIELDS if k in options}
        head, target = as_head(W), target_of(name, ids, logprobs, tail)
        return verb(hidden, dataclasses.replace(head, **own), target, chunk, **options)

    return run


def loss_of_columns(name, loss_fn, verb=None):
    """(hidden, W, labels, ids, logprobs, *per_token, tail, …) -> the loss."""
    verb = verb or functools.partial(jaxmem.divergence_loss, loss_fn)

    def run(hidden, W, labels, ids, logprobs, *per_token, tail=True, **options):
        own = {k: options.pop(k) for k in FIELDS if k in options}
        head, target = as_head(W), target_of(name, ids, logprobs, tail)
        head = dataclasses.replace(head, **own)
        return verb(hidden, head, labels, target, *per_token, **options)

    return run


topk_kl = of_columns("forward_kl")
reverse_kl = of_two_heads("reverse_kl")
forward_kl = of_two_heads("forward_kl")
jsd = of_two_heads("jsd")
