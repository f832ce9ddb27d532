"""SkyRL-tx: log-probabilities of its models, in float32, without any logits kept.

SkyRL-tx makes logits of `loss_chunk_size` tokens at a time in a `lax.map`, and keeps
them all for the backward pass unless `gradient_checkpointing` is on; with bfloat16
weights its log-probabilities are bfloat16. Here they are float32, and no logits are
kept:

    LogitsProcessorMixin._compute_chunked_logprobs

of `skyrl.tx.utils.logits_processor`, where `skyrl` is installed (0.3.0, 0.4.0), or else
of `tx.utils.logits_processor`, where `skyrl-tx` is (0.3.0).

Tied and untied heads are known, and adapters on the head: their matrices are part of
a wider head, [W; B_1; ...; B_n], on states [h; s_1 h A_1; ...], where only the adapter
of a token is not 0. That makes a gradient of W too, and throws it away. A call without
`adapter_indices` takes the first adapter, as SkyRL's does. A head of another kind is
left as it is, which is printed once (a tied head of skyrl-tx 0.3.0, a plain function,
is one); loss_chunk_size=0 asks for logits, and gets them. A negative id counts from the
end of the vocabulary, as it does to SkyRL.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.core.options import Chunk, Implementation
from jaxmem.integrations._head import Head, Options, as_index, scores
from jaxmem.integrations._replace import Integration, Replacement


def apply(*, chunk: Chunk = 1024, implementation: Implementation | None = None) -> None:
    """Replace SkyRL-tx's method, until `undo`; prints which.

    Args:
        chunk: tokens whose logits may be alive at once.
        implementation: as in `jaxmem.logprobs`.

    Raises:
        IntegrationError: SkyRL is missing, or its method takes other arguments.
    """
    _SKYRL.apply(Options(chunk, implementation))


def undo() -> None:
    """Put SkyRL-tx's method back."""
    _SKYRL.undo()


def applied(
    *, chunk: Chunk = 1024, implementation: Implementation | None = None
) -> contextlib.AbstractContextManager[None]:
    """`apply` for the time of a `with` block."""
    return _SKYRL.applied(Options(chunk, implementation))


def head_of(model: Any) -> Head | str:
    """A model's head without adapters; or why it cannot be served."""
    layer = getattr(model, "lm_head", None)
    if layer is None:
        inner = getattr(model, "model", None)
        inner = getattr(inner, "language_model", inner)  # beside one for images
        embed = getattr(inner, "embed_tokens", None)
        if embed is None:
            return f"{type(model).__name__} has neither lm_head nor model.embed_tokens"
        # SkyRL multiplies states by the table as it is, without its adapters.
        W = embed.embedding[...]
        return Head(W, "vd", W.dtype)
    if not hasattr(layer, "kernel"):
        return f"lm_head of {type(model).__name__} is a {type(layer).__name__}"
    W = layer.kernel[...]
    bias = None if layer.bias is None else layer.bias[...]
    return Head(W, "dv", layer.dtype or W.dtype, bias)


def _with_adapters(
    head: Head, layer: Any, hidden: jax.Array, adapters: jax.Array
) -> tuple[jax.Array, Head]:
    """[N, D + n·r] states, and the head that adapters have widened likewise."""
    A, B, scaling = (x[...] for x in (layer.lora_A, layer.lora_B, layer.lora_scaling))
    count, _, rank = A.shape
    hidden = hidden.astype(head.dtype)
    mine = jax.nn.one_hot(adapters, count, dtype=head.dtype) * scaling.astype(
        head.dtype
    )
    low = jnp.einsum("td,ndr->tnr", hidden, A.astype(head.dtype)) * mine[..., None]
    states = jnp.concatenate([hidden, low.reshape(-1, count * rank)], axis=1)
    W = head.W.astype(head.dtype)
    rows = B.astype(head.dtype).reshape(count * rank, -1)
    return states, head._replace(W=jnp.concatenate([W, rows]))


def _chunked_logprobs(
    original: Callable, options: Options, say: Callable[[str], None]
) -> Callable:
    @functools.wraps(original)
    def _compute_chunked_logprobs(
        self, hidden_states, target_ids, chunk_size, adapter_indices
    ):
        head = head_of(self)
        if isinstance(head, str):
            say(head)
            return original(
                self, hidden_states, target_ids, chunk_size, adapter_indices
            )
        states, labels = hidden_states, as_index(target_ids, head)
        layer = getattr(self, "lm_head", None)
        adapts = layer is not None and getattr(layer, "max_lora_adapters", 0) > 0
        if adapts:
            mine = jnp.zeros(labels.size, jnp.int32)
            if adapter_indices is not None:
                mine = jnp.repeat(adapter_indices, labels.shape[1])
            flat = states.reshape(-1, states.shape[-1])
            states, head = _with_adapters(head, layer, flat, mine)
            labels = labels.reshape(-1)
        logps, _, _ = scores(states, head, labels, options, entropy=False)
        return logps.reshape(target_ids.shape)

    return _compute_chunked_logprobs


def _chunked_in(package: str) -> Replacement:
    return Replacement(
        f"{package}.utils.logits_processor:"
        "LogitsProcessorMixin._compute_chunked_logprobs",
        _chunked_logprobs,
        ("self", "hidden_states", "target_ids", "chunk_size", "adapter_indices"),
    )


_SKYRL = Integration(
    "skyrl",
    {
        "skyrl": {"": (_chunked_in("skyrl.tx"),)},
        "skyrl-tx": {"": (_chunked_in("tx"),)},
    },
)
