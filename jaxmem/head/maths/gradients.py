"""Ways to compute gradients: one small static object, `gradient=` of a verb."""

import dataclasses
import functools
from typing import Any, Literal, get_args

import jax
import numpy as np

from jaxmem.base import messages, ranges
from jaxmem.base.fields import check_field

Forward = Literal["exact", "int8"]
# "recorded": of entries alone, which were recorded before
Logits = Literal["exact", "int8", "recorded"]

_COUNTS = ranges.integers(1, below=2**31)


@dataclasses.dataclass(frozen=True)
class Recompute:
    """Exact gradients from logits that the backward pass computes again.

    With blocks=B the backward pass goes through B blocks of the vocabulary, one after
    the other. Float32 sums exist only for one block's part of W's gradient: they take
    4·V·D/B bytes instead of 4·V·D (docs/memory.md describes the rest), for the same
    number of products. But hidden's gradient, if it has 16 bits, is rounded once per
    block, unless the vocabulary is sharded. B has no effect if there are no such sums:
    if W is not differentiated, if its gradient has the dtype of the sums, or if
    "hopper" computes few tokens at once.

    Attributes:
        blocks: B, a Python integer.

    >>> import jaxmem
    >>> jaxmem.Recompute(blocks=4)
    Recompute(blocks=4)
    """

    blocks: int = 1

    def __post_init__(self):
        """Raise a ValueError for what is no positive integer."""
        ranges.check("Recompute.blocks", self.blocks, _COUNTS)

    def facts(self, vocab_size: int) -> dict[str, Any]:
        """The fields of `Spec` that it decides on."""
        return {"gradient_blocks": self.blocks, "recomputes": True}


@dataclasses.dataclass(frozen=True)
class Sample:
    """An unbiased estimate of the gradient, from few entries of each token's logits.

    At most k + 1 entries of a token's derivative with respect to the logits are kept.
    The label's entry is exact. An entry with p ≥ 1/k is kept as it is, every other one
    with probability k·p, divided by this probability. The backward pass recomputes no
    logits. Results have the same bits as with exact gradients. The verb needs `key=`.

    With forward="int8" the logits are products of 8 bits, but exact for the label and
    the kept entries. Results are then estimates too, with a bias of second order
    (docs/sampled.md). This needs bfloat16 hidden states and a head without bias,
    softcap, temperature and shards of the vocabulary.

    Under `jax.grad` the residuals take 8·k bytes per token, or 12·k with forward="int8"
    (docs/sampled.md describes the rest).

    Attributes:
        k: a Python integer, less than the vocabulary.
        forward: "exact", or "int8".

    >>> import jaxmem
    >>> jaxmem.Sample(128)
    Sample(k=128, forward='exact')
    """

    k: int
    forward: Forward = "exact"

    def __post_init__(self):
        """Raise a ValueError for what is no positive integer, or no known forward."""
        ranges.check("Sample.k", self.k, _COUNTS)
        known = get_args(Forward)
        expected = f"one of {', '.join(map(repr, known))}"
        check_field(self, "forward", self.forward in known, expected)

    def facts(self, vocab_size: int) -> dict[str, Any]:
        """The fields of `Spec` that it decides on; a ValueError for too large a k."""
        if vocab_size == 1:
            raise ValueError(
                "gradient=Sample(k) must not be given for a vocabulary of 1, which has "
                "no other entry to sample; leave gradient out for the exact one"
            )
        if self.k >= vocab_size:
            raise ValueError(
                f"gradient=Sample(k) must have k from 1 to {vocab_size - 1}, less than "
                f"the vocabulary, got {self.k}; leave gradient out for the exact one"
            )
        return {"gradient_samples": self.k, "forward": self.forward}


@dataclasses.dataclass(frozen=True)
class Record:
    """`jaxmem.Recorded` in a configuration, before there are entries: k of a token."""

    k: int

    def __post_init__(self):
        """Raise a ValueError for what is no positive integer."""
        ranges.check('k of ("recorded", k)', self.k, _COUNTS)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["entries"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Recorded:
    """Results and gradients from entries that were recorded under earlier weights.

    No product over the vocabulary is computed: new logits are those of the label and of
    at most K recorded columns of each token. Results are estimates: the sum of
    exponentials has no bias, and no error where no logit has changed (docs/sampled.md).
    Labels, mask, temperature and head must be those of the record. `token_loss` returns
    the estimated error of each token's logsumexp as the metric `forward_error`; it is
    infinite where there is no estimate, and the token has the results of its record.

    Attributes:
        entries: `jaxmem.RecordedEntries` of the tokens; constants.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> h, W, y = jnp.ones((2, 8)), jnp.zeros((4, 8)), jnp.array([0, 3])
    >>> entries = jaxmem.record_entries(h, W, y, 3, jax.random.key(0))
    >>> jaxmem.logprobs(h, W, y, gradient=jaxmem.Recorded(entries)).round(3)
    Array([-1.386, -1.386], dtype=float32)
    """

    entries: Any

    def __repr__(self):
        return "Recorded(entries)"

    def facts(self, vocab_size: int) -> dict[str, Any]:
        """The fields of `Spec` that it decides on; an error for too many entries."""
        columns = getattr(self.entries, "columns", None)
        if columns is None:
            raise TypeError(
                "gradient=Recorded(entries) must have jaxmem.RecordedEntries, got "
                f"{messages.short(self.entries)}"
            )
        k = (np.shape(columns) or (0,))[-1]
        if not 0 < k < vocab_size:
            raise ValueError(
                "gradient=Recorded(entries) must have from 1 to less than "
                f"vocab_size={vocab_size} entries a token, got columns of shape "
                f"{np.shape(columns)}"
            )
        return {"gradient_samples": k, "forward": "recorded"}


Gradient = Recompute | Sample | Recorded
KINDS: dict[str, type] = {"recompute": Recompute, "sample": Sample}
# Classes by their names in gin files.
_SPELLED = KINDS | {"recorded": Record}


def check(gradient: Gradient | None) -> Gradient | None:
    """Require None or one of the classes here."""
    if gradient is None or type(gradient) in get_args(Gradient):
        return gradient
    raise TypeError(
        "gradient must be None, jaxmem.Recompute(blocks), jaxmem.Sample(k) or "
        f"jaxmem.Recorded(entries), got {messages.short(gradient)}"
    )


def facts(gradient: Gradient | None, vocab_size: int) -> dict[str, Any]:
    """The fields of `Spec` that `gradient=` of a verb decides on."""
    return {} if (checked := check(gradient)) is None else checked.facts(vocab_size)


def facts_of_whole_logits(gradient: Gradient | None, vocab_size: int) -> dict[str, Any]:
    """`facts`, for verbs that read a chunk's exact logits over the whole vocabulary."""
    fields = facts(gradient, vocab_size)
    if fields.get("forward") == "recorded":
        raise no_recorded("this function reads more logits than a record has")
    if fields.get("gradient_blocks", 1) > 1:
        raise NotImplementedError(
            f"gradient={gradient} must have one block: this verb reads whole rows of "
            "logits, and sums W's gradient at once"
        )
    if fields.get("forward", "exact") != "exact":
        raise NotImplementedError(
            f"gradient={gradient} must have forward='exact': this function needs more "
            "exact logits than the labels' and the sampled entries'"
        )
    return fields


def no_recorded(reason: str) -> NotImplementedError:
    """The error of a function that has no gradient=Recorded(entries)."""
    return NotImplementedError(
        "gradient=Recorded(entries) is of logprobs, token_stats and token_loss; "
        f"{reason}"
    )


def from_literal(value: object) -> Gradient | Record | None:
    """The gradient that a gin file spells as None, or as a name and arguments.

    These are ("recompute", blocks), ("sample", k), ("sample", k, "int8") and
    ("recorded", k).
    """
    if value is None:
        return None
    if isinstance(value, tuple) and value and value[0] in _SPELLED:
        kind = _SPELLED[value[0]]
        if 2 <= len(value) <= 1 + len(dataclasses.fields(kind)):
            return kind(*value[1:])
    raise ValueError(
        'gradient must be None, ("recompute", blocks), ("sample", k), '
        '("sample", k, "int8") or, for run.job="grpo", ("recorded", k), got '
        f"{messages.short(value)}"
    )
