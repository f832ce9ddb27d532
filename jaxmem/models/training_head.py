"""The head of a decoder, its options, and the cross-entropy that it trains by."""

import dataclasses
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxmem.base.fields import Must, check
from jaxmem.base.rules import needs, refused
from jaxmem.head.backends import choose
from jaxmem.head.maths import gradients
from jaxmem.head.maths.gradients import Record, Sample
from jaxmem.heads.nnx import LMHead
from jaxmem.models import embedding, lora, partitioning
from jaxmem.models.config import ModelConfig
from jaxmem.models.positions import Ids

_FUSED_ONLY = dict.fromkeys(("gradient", "implementation", "vocab_groups"))


_BACKEND = Must(
    f"{', '.join(map(repr, choose.names()))} or None",
    lambda name: name in choose.names(),
)
_CHUNK = Must(
    "a positive number of tokens, 'auto' or None",
    lambda chunk: chunk == "auto" or (isinstance(chunk, int) and chunk > 0),
)
_GROUPS = Must(
    "a power of two, at least 2, or None",
    lambda groups: type(groups) is int and groups > 1 and not groups & (groups - 1),
)


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """Options of the head: the computation of a loss from hidden states."""

    logits: Annotated[
        Literal["fused", "materialised"],
        '"fused": the logits of one chunk of tokens exist at a time. "materialised": '
        "the logits of all tokens exist at once, the usual way",
    ] = "fused"
    chunk: Annotated[
        int | Literal["auto"] | None,
        _CHUNK,
        "fused only: maximum number of tokens whose logits exist at the same time. "
        '"auto": 1,024, or up to an eighth of the tokens if the width is below 4,096, '
        "and no more than 1 GiB of float32 logits. None: no chunking",
    ] = "auto"
    gradient: Annotated[
        tuple[str, int] | tuple[str, int, str] | None,
        'fused only: method of the gradients, see jaxmem.logprobs. ("recompute", B) '
        "computes the gradient of the vocabulary matrix for one of B blocks of the "
        'vocabulary after another; ("sample", k) draws k entries of each token\'s '
        'derivative; ("sample", k, "int8") also computes its logits in 8 bits. In job '
        '"grpo", ("recorded", k) computes only the logits of k entries that were '
        "recorded when the token was sampled. None: exact gradients, all at once",
    ] = None
    implementation: Annotated[
        str | None,
        _BACKEND,
        "fused only: backend of the loss, see jaxmem.logprobs. None: the fastest one "
        "for this device",
    ] = None
    vocab_groups: Annotated[
        int | None,
        _GROUPS,
        "fused only: number of groups of the vocabulary, see jaxmem.logprobs; "
        "log-probabilities then have the same bits for any mesh.tensor. None: the "
        "fewest operations",
    ] = None

    RULES = (
        refused(
            "vocab_groups",
            "must be None with gradient={gradient}",
            lambda config: config.vocab_groups and config.gradient,
        ),
        needs(
            " ".join(_FUSED_ONLY),
            "logits='fused'",
            lambda config: config.logits == "fused",
        ),
    )

    def __post_init__(self):
        """Raise a ValueError for an unknown name or an impossible number."""
        check(self)
        try:
            gradients.from_literal(self.gradient)
        except ValueError as error:
            name = "" if str(error).startswith("gradient ") else "gradient: "
            raise ValueError(f"HeadConfig.{name}{error}") from error

    @property
    def sample(self) -> Sample | None:
        """The sampling of gradients; None where they are exact."""
        gradient = gradients.from_literal(self.gradient)
        return gradient if isinstance(gradient, Sample) else None

    @property
    def samples(self) -> int | None:
        """Entries of a token that are sampled; None where gradients are exact."""
        return self.recorded or (self.sample and self.sample.k)

    @property
    def recorded(self) -> int | None:
        """Entries of a token that are recorded before its loss; None: no loss does."""
        gradient = gradients.from_literal(self.gradient)
        return gradient.k if isinstance(gradient, Record) else None

    @property
    def exact_forward(self) -> "HeadConfig":
        """These options with ("sample", k) for ("recorded", k)."""
        if self.recorded is None:
            return self
        return dataclasses.replace(self, gradient=("sample", self.recorded))

    def using(self, logits: str) -> "HeadConfig":
        """These options with other `logits`, for comparison; materialised is exact."""
        changes: Any = {"logits": logits}
        if logits != "fused":
            changes |= _FUSED_ONLY
        return dataclasses.replace(self, **changes)


def head_options(head: HeadConfig) -> dict[str, Any]:
    """The keyword arguments of `LMHead` for these options."""
    return {
        "chunk": head.chunk,
        # Each call says how it samples, with a key or entries: evaluations do not.
        "gradient": None if head.samples else gradients.from_literal(head.gradient),
        "implementation": head.implementation,
        "vocab_groups": head.vocab_groups,
    }


def make_head(
    config: ModelConfig, head: HeadConfig, embed: nnx.Embed, rngs: nnx.Rngs
) -> LMHead:
    """The head of a decoder, over its embedding table where it is tied."""
    sharding = partitioning.head_sharding()
    options: dict[str, Any] = head_options(head) | {
        "dtype": jnp.dtype(config.dtype),
        "softcap": config.logits.softcap,
        "sharding": sharding,
        "rngs": rngs,
    }
    if config.tied:
        options |= {"tied_to": embed}
    else:
        options |= {
            "in_features": config.hidden,
            "out_features": config.vocab_size,
            "use_bias": config.logits.bias,
            "kernel_init": embedding.INIT,
            "param_dtype": jnp.dtype(config.param_dtype),
        }
    if not config.lora_head:
        return LMHead(**options)
    if sharding is not None:
        raise NotImplementedError("model.lora_head on a mesh of several devices")
    return lora.LoraHead(config, **options)


def head_loss(
    head: LMHead,
    hidden: jax.Array,
    labels: Ids,
    normalizer: jax.Array,
    logits: Literal["fused", "materialised"],
    sample: Sample | None = None,
    key: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sum of the tokens' cross-entropies, divided by `normalizer`, and metrics.

    The sum is a float32 scalar in nats; metrics are the sums over tokens of what
    `jaxmem.token_loss` tells besides.

    Args:
        head: of the decoder.
        hidden: [B, T, hidden] final hidden states.
        labels: [B, T] next token ids; negative for tokens without a loss.
        normalizer: number of tokens that count in the whole step.
        logits: "materialised" stores all logits, and serves for comparison.
        sample: how to sample the gradient, for "fused"; None: it is exact.
        key: as in `jaxmem.logprobs`, for "fused".
    """
    if logits == "fused":
        loss, metrics = head.token_loss(
            _cross_entropy, hidden, labels, normalizer=normalizer,
            gradient=sample, key=key,
        )  # fmt: skip
        return loss, {name: jnp.sum(x) for name, x in metrics.items()}
    per_token = optax.softmax_cross_entropy_with_integer_labels(
        head(hidden).astype(jnp.float32), jnp.maximum(labels, 0)
    )
    total = jnp.sum(jnp.where(labels >= 0, per_token, 0.0))
    return total / jnp.maximum(normalizer, 1), {}


def _cross_entropy(stats):
    return -stats.logprob
