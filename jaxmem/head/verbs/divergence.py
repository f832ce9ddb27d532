"""`divergence`: of a student from a teacher, without either's logits."""

import jax
from jax.typing import ArrayLike

from jaxmem.head.maths.explicit_axes import merged, with_automatic_axes
from jaxmem.head.maths.gradients import Gradient
from jaxmem.head.maths.head import Matrix
from jaxmem.head.maths.spec import AxisName, CallOptions, Chunk, Implementation
from jaxmem.head.verbs import arguments, divergence_targets
from jaxmem.head.verbs.kinds import Kind


def _sharding(values):
    """Sharding of the result, by the arguments' values."""
    return merged(*divergence_targets.specs(values))


@with_automatic_axes(_sharding)
def divergence(
    hidden: ArrayLike,
    W: Matrix,
    target: Kind,
    chunk: Chunk = 1024,
    *,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    gradient: Gradient | None = None,
    key: jax.Array | None = None,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Divergence of a student's softmax p from a target q, per token.

        p = softmax(z),  z as in `logprobs`,   out = KL(q ‖ p), KL(p ‖ q) or JSD(p, q)

    The target is constant: its gradient is zero. From a `Teacher` the forward pass
    costs 4·N·V·D FLOPs, the backward pass 8·N·V·D; if W is not differentiated, the
    forward pass under `jax.grad` costs 6·N·V·D and the backward pass nothing: it scales
    hidden's gradient, unless gradient=Recompute(). From `Columns` or `Drawn` ids the
    FLOPs are as in `logprobs` for any number of ids.

    Args:
        target: `jaxmem.ForwardKL(of)`, `ReverseKL(of)` or `JSD(of, beta)`, of a
            `jaxmem.Teacher(hidden, head)`, `Columns(ids, logprobs)` or `Drawn(ids)`.
        chunk: tokens whose logits, of both heads, may exist at once; None for all of
            them; "auto" as in `logprobs`, with room for the logits of both.
        gradient: as in `logprobs`, with one block. `Sample(k)` keeps at most k entries
            of a token, entry v with probability min(1, k d_v): d is p; for `ForwardKL`
            of a `Teacher` (p + q) / 2; for `Columns` the softmax over all other ids.
            The entries of given ids are exact.
        axis_name: as in `logprobs`, for `Columns` and `Drawn`, whose ids are those of
            the whole vocabulary.
        implementation: "xla", or None: on an NVIDIA GPU, kernels then sum over the
            vocabulary of two heads, and with `Sample(k)`, on a Hopper GPU, over the
            samples.
        hidden, W, where, temperature, key: of the student, as in `logprobs`.

    Returns:
        float32 [...] (float64 for float64 hidden), not negative, with a relative
        accuracy that holds where p and q nearly agree. It is inf where one of the two
        excludes, by a bias of -inf, what the other does not, and its gradient is NaN
        there; NaN for an id ≥ V that is known at run time only. 0 for a masked token,
        with a gradient of exactly 0, even where a hidden state is NaN.

    Raises:
        TypeError: as `logprobs`.
        ValueError: as `logprobs`; or the vocabularies differ in size.
        NotImplementedError: as `logprobs`; or gradient, axis_name or implementation is
            not for this target.

    >>> import jax.numpy as jnp, jaxmem
    >>> h, W = jnp.ones((2, 1)), jnp.log(jnp.array([[0.5], [0.5]]))
    >>> teacher = jaxmem.Teacher(h, jnp.log(jnp.array([[0.25], [0.75]])))
    >>> jaxmem.divergence(h, W, jaxmem.ForwardKL(teacher)).round(4)
    Array([0.1308, 0.1308], dtype=float32)
    """
    options = CallOptions(
        chunk=chunk, where=where, temperature=temperature, gradient=gradient, key=key,
        axis_name=axis_name, implementation=implementation,
    )  # fmt: skip
    checked = divergence_targets.check(target)
    student = divergence_targets.Student(hidden, W, arguments.NO_LABELS, options)
    return checked.of.divergence(checked.kind, student)
