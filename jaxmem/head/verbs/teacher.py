"""A teacher whose hidden states and head are known: divergences of two heads."""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem.head.backends import choose
from jaxmem.head.backends.protocol import Backend
from jaxmem.head.maths import checks, gradients
from jaxmem.head.maths.backend_operands import Factors, TokenRows
from jaxmem.head.maths.head import Head
from jaxmem.head.maths.spec import Spec
from jaxmem.head.verbs import arguments, rule
from jaxmem.head.verbs.arguments import CheckedCall
from jaxmem.head.verbs.divergence_loss_rule import statistics_scale
from jaxmem.head.verbs.divergence_targets import LossCall, Target
from jaxmem.head.verbs.sampled_two_heads import SampledTwoHeadsRule
from jaxmem.head.verbs.two_heads import TwoHeadsRule
from jaxmem.head.verbs.two_heads_loss import TwoHeadsConstants, TwoHeadsLossRule

_OWNER = "Teacher."  # of the arguments' names in errors


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["hidden", "head", "temperature"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Teacher(Target):
    """A target of a divergence over the whole vocabulary: another head's softmax.

    It is constant: its gradient is zero. The vocabulary cannot be sharded by hand, as
    two heads need all of it; `jaxmem.sharding.parallel` gathers W.

    Attributes:
        hidden: its final hidden states [..., D'], of any float dtype; D' may differ
            from the student's D.
        head: its matrix over the same vocabulary, [V, D'] or [D', V], or its
            `jaxmem.Head`; the paddings of the two heads may differ.
        temperature: positive scalar or one per token, [...]; None for the student's.

    >>> import jax.numpy as jnp, jaxmem
    >>> head = jaxmem.Head(jnp.zeros((4, 16)), softcap=30.0)
    >>> teacher = jaxmem.Teacher(jnp.ones((2, 16)), head, temperature=2.0)
    >>> h, W = jnp.ones((2, 8)), jnp.zeros((4, 8))
    >>> jaxmem.divergence(h, W, jaxmem.ReverseKL(teacher))
    Array([0., 0.], dtype=float32)
    """

    hidden: Any
    head: Any
    temperature: Any = None
    shards: ClassVar[bool] = False
    leading: ClassVar[str] = "hidden"

    def divergence(self, kind, student):
        call = _read_heads("divergence", self, student)
        reference, reference_rows = call.reference, call.reference_rows
        if 0 in call.shape:
            return jnp.zeros(call.shape, call.spec.stats_dtype)
        spec, policy = arguments.typed(
            call.spec, call.policy, (call.rows, reference_rows, reference)
        )
        rule_type = SampledTwoHeadsRule if spec.gradient_samples else TwoHeadsRule
        two_heads = rule_type(spec, call.backend, kind, call.reference_spec)
        rows = call.rows, reference_rows
        results = rule.run(two_heads, (policy,), (rows, reference))
        return jnp.reshape(results, call.shape)

    def loss(self, kind, student, statistics_temperature):
        call = _read_heads("divergence_loss", self, student)
        rule_of = functools.partial(
            TwoHeadsLossRule, divergence=kind, reference_spec=call.reference_spec
        )
        scale = statistics_scale(
            call.spec, call.shape, call.rows, statistics_temperature
        )
        constants = TwoHeadsConstants(
            call.rows, scale, call.reference_rows, call.reference
        )
        checked = CheckedCall(
            call.spec, call.backend, call.policy, constants, call.shape
        )
        return LossCall(rule_of, checked)

    def placed(self, places):
        hidden = checks.as_array(f"{_OWNER}hidden", self.hidden)
        checks.check_hidden(hidden, f"{_OWNER}hidden")
        head, columns = places.head(hidden, self.head, _OWNER)
        _check_tokens(hidden.shape[:-1], places.tokens)
        _check_vocabulary(places.vocab_size, head, columns)
        temperature = places.number(f"{_OWNER}temperature", self.temperature)
        # What the mesh pads has no probability either.
        head = dataclasses.replace(head, vocab_size=places.vocab_size)
        return Teacher(places.of_tokens(hidden, 0), head, temperature)

    def heads_as(self, whole):
        return dataclasses.replace(self, head=whole(self.head))


class _TwoHeadsCall(NamedTuple):
    """A checked call: the student is the policy, the teacher the reference."""

    spec: Spec
    reference_spec: Spec
    backend: Backend
    policy: Factors
    reference: Factors
    rows: TokenRows
    reference_rows: TokenRows
    shape: tuple[int, ...]  # of the caller's tokens


def _read_heads(verb, teacher, student) -> _TwoHeadsCall:
    """The call's arguments, checked, with all tokens in one axis; it is recorded."""
    options = student.options
    if options.axis_name is not None:
        raise NotImplementedError(
            f"axis_name={options.axis_name!r} cannot shard a divergence of two heads, "
            "which needs all of W; use jaxmem.sharding.parallel, which gathers it"
        )
    choose.check_columns(verb, options.implementation)
    policy, head, shape = arguments.read_head(student.hidden, student.W)
    reference, reference_head, reference_shape = arguments.read_head(
        teacher.hidden, teacher.head, _OWNER
    )
    _check_tokens(reference_shape, shape)
    spec = _policy_spec(policy, head, reference.columns(reference_head.layout), options)
    reference_spec = _reference_spec(spec, reference, reference_head)
    rows = arguments.read_rows(spec, shape, student.labels, options)
    reference_rows = rows
    if teacher.temperature is not None:
        temperature = arguments.read_temperature(
            f"{_OWNER}temperature",
            teacher.temperature,
            shape,
            reference_spec.stats_dtype,
        )
        reference_rows = rows._replace(temperature=temperature)
    shapes = policy.shapes(shape)
    reference_shapes = reference.shapes(shape).items()
    shapes |= {f"{_OWNER}{name}": size for name, size in reference_shapes}
    live_bytes = 4 * spec.chunk * (spec.columns + reference_spec.columns)
    backend = arguments.choose_columns(
        verb, spec, policy, options.implementation, shapes, live_bytes
    )
    return _TwoHeadsCall(
        spec, reference_spec, backend, policy, reference, rows, reference_rows, shape
    )


def _policy_spec(policy, head, reference_columns: int, options) -> Spec:
    """The static facts of the policy's head, whose chunk has room for both heads."""
    spec = arguments.spec_of(policy, head, (), options)
    gradients.facts_of_whole_logits(options.gradient, spec.vocab_size)
    columns, n_tokens = spec.columns + reference_columns, len(policy.hidden)
    chunk = checks.check_chunk(options.chunk, n_tokens, columns, policy.depth)
    return dataclasses.replace(spec, chunk=chunk)


def _reference_spec(spec: Spec, reference: Factors, head: Head) -> Spec:
    """The static facts of the reference's head, of the vocabulary of `spec`."""
    columns = reference.columns(head.layout)
    _check_vocabulary(spec.vocab_size, head, columns)
    return dataclasses.replace(
        spec,
        columns=columns,
        gradient_samples=None,
        compute_dtype=reference.hidden.dtype,
        layout=head.layout,
        softcap=checks.check_softcap(head.softcap, f"{_OWNER}softcap"),
    )


def _check_tokens(of_teacher, shape) -> None:
    if of_teacher != shape:
        raise ValueError(
            f"{_OWNER}hidden must have hidden's tokens, shape {shape}, got {of_teacher}"
        )


def _check_vocabulary(vocab_size: int, head: Head, columns: int) -> None:
    """Raise unless the teacher's head has this vocabulary."""
    of_teacher = checks.check_vocab_size(head.vocab_size, columns)
    if of_teacher != vocab_size:
        raise ValueError(
            f"W and {_OWNER}head must have the same vocabulary, got {vocab_size} and "
            f"{of_teacher} tokens; if one is padded, pass jaxmem.Head(W, "
            "vocab_size=…)"
        )
