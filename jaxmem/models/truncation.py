"""The distribution that a token is drawn from: temperature, top k, top p, min p."""

import dataclasses
import math
from typing import Annotated

import jax
import jax.numpy as jnp

from jaxmem.base.fields import Must, check, check_field
from jaxmem.base.ranges import integers
from jaxmem.base.rules import must
from jaxmem.models import largest

_COUNT = Must("at least 1", lambda count: count >= 1)
_SHARE = Must("in (0, 1]", lambda share: 0 < share <= 1)


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """Lengths, temperature and truncation of sampled completions."""

    max_new_tokens: Annotated[
        int, integers(1), "maximum tokens of a completion, its end token included"
    ] = 8
    temperature: Annotated[
        float,
        Must("positive and finite", lambda value: 0 < value < math.inf),
        "divisor of the logits, applied before any truncation",
    ] = 1.0
    top_k: Annotated[
        int | None,
        _COUNT,
        "number of most probable tokens among which to sample. None: no such limit",
    ] = None
    top_p: Annotated[
        float | None,
        _SHARE,
        "sample among the fewest tokens whose probabilities sum to at least this. "
        "None: no such limit",
    ] = None
    support: Annotated[
        int | None,
        _COUNT,
        "maximum number of tokens that truncation keeps, a static shape. None: top_k. "
        "It must be set if top_p or min_p is set without top_k",
    ] = None
    min_p: Annotated[
        float | None,
        _SHARE,
        "drop tokens whose probability is below this fraction of the highest one. "
        "None: no such limit",
    ] = None
    slots: Annotated[
        int | None,
        _COUNT,
        "number of completions that are decoded at the same time; when one ends, the "
        "next takes its row. None: all of a rollout",
    ] = None
    decode_base: Annotated[
        bool,
        "with model.base, decode the codes of all blocks once per call, which takes "
        "the memory of 16-bit weights. False: decode each layer in each step",
    ] = False

    RULES = (
        must(
            "support",
            "given for a top_p or min_p without top_k",
            lambda config: (
                config.support is not None
                or config.top_k is not None
                or not config.truncates
            ),
        ),
        must(
            "support",
            "None if top_k, top_p and min_p are all None",
            lambda config: config.support is None or config.truncates,
        ),
        must(
            "support",
            "at least top_k={top_k}",
            lambda config: (
                None in (config.support, config.top_k) or config.support >= config.top_k
            ),
        ),
    )

    def __post_init__(self):
        check(self)

    @property
    def truncates(self) -> bool:
        """True if the support can be smaller than the vocabulary."""
        others = self.top_k, self.nucleus, self.min_p
        return any(limit is not None for limit in others)

    @property
    def nucleus(self) -> float | None:
        """The top_p, or None if it is 1, which sums of rounded terms could reach."""
        return None if self.top_p == 1 else self.top_p

    @property
    def support_size(self) -> int | None:
        """Ids in each of `Samples.support_ids`; None without truncation."""
        if not self.truncates:
            return None
        return self.top_k if self.support is None else self.support


def truncate(
    logits: jax.Array, config: SamplingConfig
) -> tuple[jax.Array, jax.Array | None]:
    """Log-probabilities of the truncated distribution.

        z = logits / T;   S = the top k of z;   then S = the fewest of the most probable
        of softmax_S(z) that have at least top_p;   then S without the tokens of which
        e^(z - max z) < min_p;   out = z - ln Σ_(v in S) e^(z_v)

    Temperature comes first, as in other samplers, so the support of top_p depends on
    it. With both, top_p counts the probability within the top k. A support of more than
    `support` tokens is cut to the most probable of them. Ties keep the lower ids.

    Args:
        logits: [B, V] f32.
        config: temperature, top_k, top_p, min_p, support.

    Returns:
        Log-probabilities [B, K] by falling probability, -inf outside S, and the ids
        [B, K], -1 outside S; or [B, V] by id and None without truncation.

    Raises:
        ValueError: top_k or support is larger than the vocabulary.

    >>> import jax.numpy as jnp
    >>> logits = jnp.log(jnp.array([[0.1, 0.5, 0.3, 0.1]]))
    >>> logprobs, ids = truncate(logits, SamplingConfig(top_p=0.7, support=3))
    >>> print(jnp.exp(logprobs).round(1), ids)
    [[0.6 0.4 0. ]] [[ 1  2 -1]]

    Reference: top k: Fan et al., 2018, arXiv:1805.04833; top p: Holtzman et al., 2019,
    arXiv:1904.09751; min p: Nguyen et al., 2024, arXiv:2407.01082.
    """
    z = _scale_logits(logits, config)
    size = config.support_size
    if size is None:
        return jax.nn.log_softmax(z), None
    name = "top_k" if config.support is None else "support"
    vocab_size = z.shape[-1]
    check_field(config, name, size <= vocab_size, f"at most {vocab_size} (vocab_size)")
    values, ids = largest.top(z, size)
    within = z
    if config.top_k is not None:
        values = jnp.where(jnp.arange(size) < config.top_k, values, -jnp.inf)
        within = values
    kept = values > -jnp.inf
    if config.nucleus is not None:
        whole = jax.nn.logsumexp(within, axis=-1, keepdims=True)
        sums = jnp.cumsum(jnp.exp(values - whole), axis=-1)
        # Keep a token if those before it have too little; the first is always kept.
        before = jnp.pad(sums[:, :-1], ((0, 0), (1, 0)))
        kept &= before < config.nucleus
    if config.min_p is not None:
        kept &= values >= jnp.log(config.min_p)  # the largest value is 0
    logprobs = jax.nn.log_softmax(jnp.where(kept, values, -jnp.inf))
    return logprobs, jnp.where(kept, ids, -1)


def _scale_logits(logits: jax.Array, config: SamplingConfig) -> jax.Array:
    """Logits by temperature, of which each row's largest is 0."""
    # Subtract the largest logit first: at a low temperature, the log-probability of the
    # most probable token is then exactly 0, without the rounding of two large numbers.
    best = jnp.max(logits, axis=-1, keepdims=True)
    return (logits - best) / config.temperature


def among_all(logits: jax.Array, config: SamplingConfig) -> jax.Array:
    """`truncate` where all ids are in the support: [B, V] by id, without a sort."""
    z = _scale_logits(logits, config)
    kept = jnp.ones(z.shape, bool)
    if config.nucleus is not None:
        kept &= largest.nucleus(z, config.nucleus)
    if config.min_p is not None:
        kept &= z >= jnp.log(config.min_p)
    return jax.nn.log_softmax(jnp.where(kept, z, -jnp.inf))
