"""Completions of conversations' turns, and the record of a conversation made of them.

    complete(ids of all tokens so far, max_tokens) -> TurnCompletion

A sampler on the run's own devices and an inference engine both complete turns so.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np


class TurnCompletion(NamedTuple):
    """The tokens that were sampled in one turn of a conversation."""

    ids: list[int]
    logprobs: list[float]  # one for each id, of the distribution it was drawn from
    ended: bool  # True: by the last id, an end; False: by the limit of tokens
    supports: list[list[int]] | None = None  # the ids each token was drawn from
    # experts of all tokens that were read: those of the prompt, and all but the last id
    routes: np.ndarray | None = None
    # (version of the weights, tokens sampled with it); None: unknown
    versions: list[tuple[int, int]] | None = None


# Ids of all tokens so far, and the maximum of tokens to sample.
Complete = Callable[[list[int], int], TurnCompletion]


def joined(parts: Sequence[TurnCompletion | Sequence[int]]) -> dict[str, Any]:
    """The fields of a `Transcript` about the tokens after a prompt.

    Args:
        parts: completions, and ids that the policy did not sample, in their order.
    """
    sampled = [part for part in parts if isinstance(part, TurnCompletion)]
    ids: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    turns: list[int] = []
    supports: list[list[int]] = []
    turn = 0
    for part in parts:
        own = isinstance(part, TurnCompletion)
        tokens = part.ids if own else [int(i) for i in part]
        count = len(tokens)
        ids += tokens
        logprobs += part.logprobs if own else [0.0] * count
        mask += [int(own)] * count
        turns += [turn if own else max(turn - 1, 0)] * count
        supports += (own and part.supports) or [[]] * count
        turn += own
    fields: dict[str, Any] = {
        "completion_ids": ids,
        "logprobs": logprobs,
        "mask": mask,
        "turns": turns,
    }
    if sampled and all(part.supports is not None for part in sampled):
        fields["supports"] = supports
    if sampled and all(part.versions is not None for part in sampled):
        fields["versions"] = _spans(parts)
    if sampled and parts[-1] is sampled[-1] and sampled[-1].routes is not None:
        fields["routes"] = sampled[-1].routes
    return fields


def _spans(parts: Sequence[TurnCompletion | Sequence[int]]) -> list[tuple[int, int]]:
    """Versions of all tokens; those of others count to the completion before them."""
    spans: list[tuple[int, int]] = []
    before = 0  # tokens before the first completion
    for part in parts:
        if isinstance(part, TurnCompletion):
            added = part.versions or []
        elif spans:
            added = [(spans[-1][0], len(part))]
        else:
            before += len(part)
            continue
        for version, count in added:
            if spans and spans[-1][0] == version:
                spans[-1] = version, spans[-1][1] + count
            elif count:
                spans.append((version, count))
    if spans:
        spans[0] = spans[0][0], spans[0][1] + before
    return spans
