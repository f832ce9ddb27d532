"""Tokens that drafts from text would give: recorded completions are decoded again.

A draft is accepted exactly where it equals the token that is drawn, so that a record
gives the accepted length without any decoding. For each token, the longest suffix of
the row that also occurs in a pool of texts is found, and what follows there is the
draft:

    match_t[j] = (pool[j] == row[t]) · (match_{t-1}[j-1] + 1)

Of the places with the longest match the last one is taken. Nothing is drafted behind a
match shorter than `LEAST`. A draft from the row's own text goes on with itself beyond
the row's end, as a repetition does.

Pools:

    own     the prompt, and the row so far
    beside  and the siblings' tokens up to the row's own step: all rows start together
    group   and the siblings that ended before it, whole, shorter ones first: rows start
            one after the other, as slots are refilled
    epoch   and all other completions of the prompt, of an earlier epoch
"""

import dataclasses
from typing import NamedTuple

import numpy as np

LEAST = 2  # tokens of a match that is drafted behind
SEPARATOR = -1  # between two texts
POOLS = ("own", "beside", "group", "epoch")


@dataclasses.dataclass(frozen=True)
class Group:
    """A prompt, its completions, and maybe those of an earlier epoch."""

    prompt: np.ndarray
    rows: list[np.ndarray]  # each with its end, if it ended
    earlier: list[np.ndarray] | None = None  # None: every row's siblings


class Pool(NamedTuple):
    """Texts one after the other, the row's prompt and the row last."""

    tokens: np.ndarray  # [N]
    known: np.ndarray  # [N] tokens that the row has when a place becomes known
    prompt: int  # place of the prompt's first token
    row: int  # place of the row's first token


class Drafts(NamedTuple):
    """For each token of a row, the draft that begins there."""

    lengths: np.ndarray  # tokens of the draft
    accepted: np.ndarray  # of them, those that equal the row


def pool(group: Group, index: int, kind: str) -> Pool:
    """The pool of a kind for one row of a group.

    The last tokens of the prompt stand before each other completion, so that a row
    without tokens has a match.
    """
    texts, begin = _others(group, index, kind), group.prompt[-LEAST:]
    tokens, known = [], []
    for text in texts:
        steps = np.arange(1, len(text) + 1) * (kind == "beside")
        tokens += [begin, text, [SEPARATOR]]
        known += [np.zeros(len(begin)), steps, [0]]
    row = group.rows[index]
    tokens += [group.prompt, row]
    known += [np.zeros(len(group.prompt)), np.arange(1, len(row) + 1)]
    joined = np.concatenate(tokens).astype(np.int32)
    first = len(joined) - len(row)
    known = np.concatenate(known).astype(np.int32)
    return Pool(joined, known, first - len(group.prompt), first)


def _others(group: Group, index: int, kind: str) -> list[np.ndarray]:
    """The texts of a row's pool beside its own."""
    if kind == "own":
        return []
    if kind == "group":
        order = sorted(range(len(group.rows)), key=lambda i: (len(group.rows[i]), i))
        return [group.rows[i] for i in order[: order.index(index)]]
    if kind == "epoch" and group.earlier is not None:
        return group.earlier
    return [row for i, row in enumerate(group.rows) if i != index]


def drafts(pool: Pool, most: int) -> Drafts:
    """The drafts of at most `most` tokens at each token of the row."""
    tokens, unknown = pool.tokens, np.iinfo(np.int32).max
    # A draft begins behind a place: no text ends there, and the next token is known.
    begins = np.append(pool.known[1:], unknown)
    begins[np.append(tokens[1:], SEPARATOR) == SEPARATOR] = unknown
    match = np.zeros(len(tokens), np.int32)
    for token in tokens[pool.prompt : pool.row]:
        match = _longer(match, tokens, token)
    count = len(tokens) - pool.row
    lengths, accepted = np.zeros(count, np.int32), np.zeros(count, np.int32)
    for t in range(count):
        usable = np.where(begins <= t, match, 0)
        place = len(usable) - 1 - int(usable[::-1].argmax())  # the last of the longest
        following = tokens[pool.row + t :]
        if usable[place] >= LEAST:
            draft = _draft(pool, place, t, min(most, len(following)))
            lengths[t] = len(draft)
            accepted[t] = np.cumprod(draft == following[: len(draft)]).sum()
        match = _longer(match, tokens, following[0])
    return Drafts(lengths, accepted)


def _longer(match: np.ndarray, tokens: np.ndarray, token: int) -> np.ndarray:
    """The matches that end at each place, with one more token of the row."""
    longer = np.ones_like(match)
    longer[1:] += match[:-1]
    return longer * (tokens == token)


def _draft(pool: Pool, place: int, t: int, most: int) -> np.ndarray:
    """The tokens behind a place that are known when the row has t tokens."""
    offsets = np.arange(most)
    if place >= pool.prompt:  # beyond the row's end, the draft repeats itself
        return pool.tokens[place + 1 + offsets % (pool.row + t - place - 1)]
    places = place + 1 + offsets
    ends = (pool.tokens[places] == SEPARATOR) | (pool.known[places] > t)
    return (
        pool.tokens[places[: int(ends.argmax())]] if ends.any() else pool.tokens[places]
    )


class Steps(NamedTuple):
    """Verifications that a row takes, and what they drafted."""

    steps: int
    drafted: int  # tokens
    accepted: int


def steps(drafts: Drafts, k: int) -> Steps:
    """The steps of a row with drafts of at most k tokens; each adds one of its own."""
    count, drafted, accepted, t = 0, 0, 0, 0
    while t < len(drafts.lengths):
        took = min(int(drafts.accepted[t]), k)
        drafted += min(int(drafts.lengths[t]), k)
        accepted += took
        count, t = count + 1, t + took + 1
    return Steps(count, drafted, accepted)
