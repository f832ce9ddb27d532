"""Divergences between two heads over the whole vocabulary, without either's logits.

With p of the policy, q of the reference and d_v = ln p_v - ln q_v, the textbook's Σ p d
adds terms of both signs: at a KL of 1e-6, float32 has no correct digit left. As Σ p = Σ
q = 1, each divergence is also a sum of terms that are never negative,

    KL(p ‖ q) = Σ_v e(p_v, q_v),   e(a, b) = a ln(a/b) - a + b = a (e^-x - 1 + x),

x = ln(a/b), in which an error of either logsumexp cancels to first order. For a mixture
m = β q + (1-β) p, the terms e(q, m) and e(p, m), weighed by β and 1-β, add up to
β q ln(q/m) + (1-β) p ln(p/m), which `divergence_terms` computes from one logarithm. The
derivative needs only s_v = ∂D/∂p_v: dz_v = p_v (s_v - Σ_u p_u s_u).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxmem import devices
from jaxmem.backends import choose
from jaxmem.core import checks, gradients, partition
from jaxmem.core.explicit_axes import sharded_like, with_automatic_axes
from jaxmem.core.gradients import Gradient
from jaxmem.core.head import Head, Matrix
from jaxmem.core.operands import Factors, Rows
from jaxmem.core.options import CallOptions, Chunk, Implementation
from jaxmem.core.spec import Spec
from jaxmem.functional import arguments, rule
from jaxmem.functional.divergence_terms import JSD, KL, ForwardKL
from jaxmem.functional.sampled import sampler_of
from jaxmem.functional.sampled_two_heads import SampledTwoHeadsRule
from jaxmem.functional.two_heads import TwoHeadsRule


@with_automatic_axes(sharded_like(hidden=1, reference_hidden=1))
def kl(
    hidden: ArrayLike,
    W: Matrix,
    reference_hidden: ArrayLike,
    reference_W: Matrix,
    chunk: Chunk = 1024,
    *,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    reference_temperature: ArrayLike | None = None,
    gradient: Gradient | None = None,
    key: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """KL divergence of a policy from a reference, per token, over the whole vocabulary.

        p = softmax(z),  q = softmax(reference z),  z as in `logprobs`
        out = KL(p ‖ q) = Σ_v p_v (ln p_v - ln q_v)                            (nats)

    RLHF penalises it, and distillation calls it the reverse KL (p the student, q the
    teacher). The reference is constant: its gradient is zero. The forward pass costs
    4·N·V·D FLOPs, the backward pass 8·N·V·D. If W is not differentiated, the forward
    pass under `jax.grad` costs 6·N·V·D and the backward pass nothing: it scales
    hidden's gradient, unless gradient=Recompute().

    Args:
        hidden: the policy's final hidden states [..., D], as in `logprobs`.
        W: the policy's vocabulary matrix, [V, D] or [D, V], or its `jaxmem.Head`.
        reference_hidden: the reference's hidden states [..., D'], of any float dtype;
            D' may differ from D.
        reference_W: its matrix over the same vocabulary, [V, D'] or [D', V], or its
            `jaxmem.Head`; the paddings of the two may differ.
        chunk: tokens whose logits of both heads may be alive at once; None for all of
            them; "auto" for as many as fit 512 MiB.
        where: booleans [...]; False masks a token, which then costs nothing.
        temperature: positive scalar or one per token, [...]; not differentiable.
        reference_temperature: None for the policy's.
        gradient: as in `logprobs`, with one block. `Sample(k)` keeps at most k entries
            of a token: entry v with probability min(1, k p_v), in `forward_kl` min(1,
            k (p_v + q_v) / 2).
        key: PRNG key of the samples, as in `logprobs`.
        implementation: "xla", or None: on an NVIDIA GPU, kernels then sum over the
            vocabulary, and with `Sample(k)`, on a Hopper GPU, over the samples.

    Returns:
        float32 [...] (float64 for float64 hidden), not negative, with a relative
        accuracy that holds where p and q nearly agree. It is inf where a bias of -inf
        excludes a token in q but not in p, and its gradient is NaN there. 0 for a
        masked token, with a gradient of exactly 0, even where a hidden state is NaN.

    Memory in docs/memory.md and communication in docs/meshes.md ("kl").

    Raises:
        TypeError: an argument has the wrong type; the message names it.
        ValueError: shapes disagree, a layout is ambiguous, the vocabularies differ in
            size, or a number is not positive.
        NotImplementedError: a gradient of a temperature or a second derivative is
            requested, or the implementation does not have divergences.

    >>> import jax.numpy as jnp, jaxmem
    >>> h, W = jnp.ones((2, 1)), jnp.log(jnp.array([[0.5], [0.5]]))
    >>> jaxmem.kl(h, W, h, jnp.log(jnp.array([[0.25], [0.75]]))).round(2)
    Array([0.14, 0.14], dtype=float32)

    Reference: Ouyang et al., "Training language models to follow instructions with
    human feedback", 2022, arXiv:2203.02155, for the penalty; Gu et al., "MiniLLM",
    2023, arXiv:2306.08543, for distillation.
    """
    options = CallOptions(
        chunk=chunk, where=where, temperature=temperature, gradient=gradient, key=key,
        implementation=implementation,
    )  # fmt: skip
    reference = Reference(reference_hidden, reference_W, reference_temperature)
    return _divergence("kl", KL(), hidden, W, reference, options)


@with_automatic_axes(sharded_like(hidden=1, reference_hidden=1))
def forward_kl(
    hidden: ArrayLike,
    W: Matrix,
    reference_hidden: ArrayLike,
    reference_W: Matrix,
    chunk: Chunk = 1024,
    *,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    reference_temperature: ArrayLike | None = None,
    gradient: Gradient | None = None,
    key: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """KL divergence of a reference from a policy, per token: `kl` with p and q swapped.

        out = KL(q ‖ p) = Σ_v q_v (ln q_v - ln p_v)                            (nats)

    The classical loss of distillation: cross-entropy with the teacher q's
    probabilities, less the teacher's entropy. Arguments, accuracy, cost, memory,
    communication and errors are those of `kl`.

    >>> import jax.numpy as jnp, jaxmem
    >>> h, W = jnp.ones((2, 1)), jnp.log(jnp.array([[0.5], [0.5]]))
    >>> jaxmem.forward_kl(h, W, h, jnp.log(jnp.array([[0.25], [0.75]]))).round(4)
    Array([0.1308, 0.1308], dtype=float32)

    Reference: Hinton et al., "Distilling the Knowledge in a Neural Network", 2015,
    arXiv:1503.02531.
    """
    options = CallOptions(
        chunk=chunk, where=where, temperature=temperature, gradient=gradient, key=key,
        implementation=implementation,
    )  # fmt: skip
    reference = Reference(reference_hidden, reference_W, reference_temperature)
    return _divergence("forward_kl", ForwardKL(), hidden, W, reference, options)


@with_automatic_axes(sharded_like(hidden=1, reference_hidden=1))
def jsd(
    hidden: ArrayLike,
    W: Matrix,
    reference_hidden: ArrayLike,
    reference_W: Matrix,
    chunk: Chunk = 1024,
    *,
    beta: float = 0.5,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    reference_temperature: ArrayLike | None = None,
    gradient: Gradient | None = None,
    key: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Generalised Jensen-Shannon divergence of a policy p and a reference q, per token.

        m = β q + (1-β) p
        out = β KL(q ‖ m) + (1-β) KL(p ‖ m)                                    (nats)

    It is symmetric at β = 0.5 and never above ln 2. Divided by β it tends to
    `forward_kl` as β → 0, divided by 1-β to `kl` as β → 1. Accuracy, cost, memory,
    communication and errors are those of `kl`.

    Args:
        beta: weight of the reference in the mixture, a Python number between 0 and 1.
        hidden, W, reference_hidden, reference_W, chunk, where, temperature,
            reference_temperature, gradient, key, implementation: as in `kl`.

    Returns:
        float32 [...] (float64 for float64 hidden), between 0 and ln 2; 0 where masked.

    >>> import jax.numpy as jnp, jaxmem
    >>> h, W = jnp.ones((2, 1)), jnp.log(jnp.array([[0.5], [0.5]]))
    >>> jaxmem.jsd(h, W, h, jnp.log(jnp.array([[0.25], [0.75]]))).round(4)
    Array([0.0338, 0.0338], dtype=float32)

    Reference: Agarwal et al., "On-Policy Distillation of Language Models", 2023,
    arXiv:2306.13649, with their β.
    """
    options = CallOptions(
        chunk=chunk, where=where, temperature=temperature, gradient=gradient, key=key,
        implementation=implementation,
    )  # fmt: skip
    reference = Reference(reference_hidden, reference_W, reference_temperature)
    return _divergence("jsd", JSD(check_beta(beta)), hidden, W, reference, options)


class Reference(NamedTuple):
    """The arguments whose names begin with reference_."""

    hidden: Any
    W: Any
    temperature: Any  # None: the policy's


class TwoHeads(NamedTuple):
    """A checked call of two heads; operands have all tokens in one axis."""

    spec: Spec
    reference_spec: Spec
    policy: Factors
    reference: Factors
    rows: Rows
    reference_rows: Rows
    shape: tuple[int, ...]  # of the tokens


def read_two_heads(
    verb: str, hidden, W, reference: Reference, labels, options: CallOptions
) -> TwoHeads:
    """Check the arguments of a call of two heads, and record it.

    Args:
        verb: its name.
        hidden: the policy's [..., D].
        W: the policy's.
        reference: the other head.
        labels: [...], or `arguments.NO_LABELS`.
        options: of the policy's head.

    Returns:
        The call.
    """
    arguments.check_only_xla(verb, options.implementation)
    policy, head, shape = arguments.read_head(hidden, W)
    other, other_head, other_shape = arguments.read_head(
        reference.hidden, reference.W, "reference_"
    )
    check_tokens(other_shape, shape)
    spec, other_spec = _specs((policy, head), (other, other_head), options)
    rows = arguments.read_rows(spec, shape, labels, options)
    other_rows = _reference_rows(other_spec, shape, rows, reference.temperature)
    shapes = arguments.shapes_of(policy, shape)
    of_other = arguments.shapes_of(other, shape).items()
    shapes |= {f"reference_{name}": size for name, size in of_other}
    live_bytes = 4 * spec.chunk * (spec.columns + other_spec.columns)
    arguments.record_only_xla(verb, spec, shapes, options.implementation, live_bytes)
    return TwoHeads(spec, other_spec, policy, other, rows, other_rows, shape)


def _divergence(verb, divergence, hidden, W, reference, options):
    """The divergence per token, [...], of a head from a `Reference`."""
    call = read_two_heads(verb, hidden, W, reference, arguments.NO_LABELS, options)
    spec, other_spec, policy, other, rows, other_rows, shape = call
    if 0 in shape:
        return jnp.zeros(shape, spec.stats_dtype)
    spec, policy = arguments.typed(spec, policy, (rows, other_rows, other))
    kernels = uses_kernels(options.implementation)
    two_heads = TwoHeadsRule(spec, divergence, other_spec, kernels)
    if spec.gradient_samples is not None:
        backend, _ = choose.choose(options.implementation, spec, policy)
        two_heads = SampledTwoHeadsRule(
            spec, divergence, other_spec, kernels, sampler_of(backend)
        )
    results = rule.run(two_heads, (policy,), ((rows, other_rows), other))
    return jnp.reshape(results, shape)


def uses_kernels(implementation: Implementation | None) -> bool:
    """Whether sums over the vocabulary are those of `kernels.row_sums`."""
    on_gpu = implementation is None and devices.backend() == "gpu"
    return on_gpu and devices.has_mosaic()


def _specs(policy, reference, options):
    """The static facts of both heads, with one chunk and one vocabulary."""
    (policy, head), (other, other_head) = policy, reference
    columns = arguments.columns_of(policy, head.layout)
    other_columns = arguments.columns_of(other, other_head.layout)
    both, n_tokens = columns + other_columns, policy.hidden.shape[0]
    vocab_size = check_vocabularies(head, columns, other_head, other_columns)
    facts = gradients.facts(options.gradient, vocab_size)
    if facts.get("gradient_blocks", 1) > 1:
        raise NotImplementedError(
            f"gradient={options.gradient} must have one block: a divergence of two "
            "heads sums W's gradient at once"
        )
    spec = Spec(
        columns=columns,
        vocab_size=vocab_size,
        chunk=checks.check_chunk(options.chunk, n_tokens, both),
        outputs=(),
        compute_dtype=policy.hidden.dtype,
        layout=head.layout,
        softcap=checks.check_softcap(head.softcap),
        token_parallel=partition.is_possible(),
        **facts,
    )
    other_spec = dataclasses.replace(
        spec,
        columns=other_columns,
        gradient_samples=None,
        compute_dtype=other.hidden.dtype,
        layout=other_head.layout,
        softcap=checks.check_softcap(other_head.softcap, "reference_softcap"),
    )
    return spec, other_spec


def check_tokens(reference_shape, shape) -> None:
    """Raise unless the reference's tokens have the policy's shape."""
    if reference_shape != shape:
        raise ValueError(
            f"reference_hidden must have hidden's tokens, shape {shape}, got "
            f"{reference_shape}"
        )


def _reference_rows(spec, shape, rows, temperature):
    if temperature is None:
        return rows
    temperature = arguments.read_temperature(
        "reference_temperature", temperature, shape, spec.stats_dtype
    )
    return rows._replace(temperature=temperature)


def check_beta(beta) -> float:
    """The weight of the reference, strictly between 0 and 1."""
    if not isinstance(beta, (int, float)) or isinstance(beta, bool):
        raise TypeError(f"beta must be a Python number, got {checks.brief(beta)}")
    if not 0 < beta < 1:
        raise ValueError(
            f"beta must lie between 0 and 1, got {beta}; the limits are forward_kl "
            "(towards 0) and kl (towards 1)"
        )
    return float(beta)


def check_vocabularies(head: Head, columns: int, other: Head, other_columns) -> int:
    """The size of the vocabulary that both heads have."""
    size = checks.check_vocab_size(head.vocab_size, columns)
    of_other = checks.check_vocab_size(other.vocab_size, other_columns)
    if size != of_other:
        raise ValueError(
            f"W and reference_W must have the same vocabulary, got {size} and "
            f"{of_other} tokens; where one is padded, pass jaxmem.Head(W, vocab_size=…)"
        )
    return size
