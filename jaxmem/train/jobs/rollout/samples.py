"""Sampled completions with their rewards, and the choice of groups to learn from."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmem.models.sampling import Samples
from jaxmem.train.jobs.advantages import Compare
from jaxmem.train.jobs.rollout.nested_rows import join, padded, take
from jaxmem.train.jobs.rollout.packed import Completions
from jaxmem.train.jobs.rollout.prompts import Graded, PromptIds
from jaxmem.train.jobs.rollout.transcripts import Transcript, TranscriptLimits


def draw_number(step: int, attempt: int, turn: int) -> int:
    """The number that, with the seed, determines the random numbers of completions.

    It is the step, which is positive, for the first attempt and turn; others have
    numbers of their own below 0.
    """
    if not (attempt or turn):
        return step
    drawn = np.random.SeedSequence([step, attempt, turn]).generate_state(1)[0]
    return -1 - int(drawn >> 1)


class SlotUse(NamedTuple):
    """Counts of decoded tokens and of the sampler's slots.

    The first token of a completion comes from its prompt, and is not counted.
    """

    tokens: int  # of completions
    slots: int  # steps times slots

    @property
    def busy(self) -> float | None:
        """Share of the slots that decoded a token; None where nothing was decoded."""
        return self.tokens / self.slots if self.slots else None


class ByTurn(NamedTuple):
    """Rewards of N conversations by turn."""

    rewards: np.ndarray  # float32 [N, T]; 0 after the last turn
    of_token: np.ndarray  # [N, R] index of each sampled token's turn

    @property
    def returns(self) -> np.ndarray:
        """Sums [N, T] of the rewards of each turn and of those after it."""
        return np.cumsum(self.rewards[:, ::-1], axis=1)[:, ::-1]


class Sampled(NamedTuple):
    """N completions in the order of their prompts, `group_size` to a prompt."""

    prompts: PromptIds
    completions: Completions
    samples: Samples
    graded: Graded
    truncated: np.ndarray  # [N] bool, True where the last completion has no end
    turns: np.ndarray  # [N] completions of a conversation
    decoded: SlotUse  # for these and for completions that were not selected
    by_turn: ByTurn | None = None  # where turns are compared, not conversations
    conversation: ByTurn | None = None  # of conversations, whatever is compared
    # the N completions in their own form; None: the run's own sampler made them
    transcripts: list[Transcript] | None = None

    def rewards_differ(self, group_size: int) -> np.ndarray:
        """Boolean array [groups]: True where rewards within the group differ."""
        values = self.graded.rewards[:, None]
        if self.by_turn is not None:
            values = self.by_turn.returns
        groups = values.reshape(-1, group_size, values.shape[1])
        rewarded = self.graded.rewarded.reshape(-1, group_size, 1)
        highest = groups.max(axis=1, where=rewarded, initial=-np.inf)
        lowest = groups.min(axis=1, where=rewarded, initial=np.inf)
        return np.any(highest > lowest, axis=1)

    def rewarded(self, group_size: int) -> np.ndarray:
        """Boolean array [groups]: True where any completion has a reward."""
        return np.any(self.graded.rewarded.reshape(-1, group_size), axis=1)

    def advantages(self, group_size: int, compare: Compare) -> np.ndarray:
        """Advantages of completions [N]; or of tokens [N, R] if turns are compared.

        `compare` gets rewards [prompts, group_size]. They are NaN for completions
        without a reward, whose advantages are 0. The reward of a turn is the sum of
        the rewards from that turn on, NaN in conversations that ended before it.
        """
        shape = -1, group_size
        rewarded = self.graded.rewarded
        if self.by_turn is None:
            return compare(self.graded.rewards.reshape(shape)).ravel()
        returns = self.by_turn.returns
        has_turn = np.arange(returns.shape[1]) < self.turns[:, None]
        returns = np.where(has_turn & rewarded[:, None], returns, np.nan)
        compared = [compare(turn.reshape(shape)).ravel() for turn in returns.T]
        of_token = self.by_turn.of_token
        return np.take_along_axis(np.stack(compared, axis=1), of_token, axis=1)


def sampled_of(
    transcripts: Sequence[Transcript],
    prompts: PromptIds,
    limits: TranscriptLimits,
    graded: Graded | None = None,
) -> Sampled:
    """The arrays of transcripts, in the order of their prompts.

    Args:
        transcripts: N of them, which `limits` has checked.
        prompts: their prompts.
        limits: sizes of the arrays.
        graded: rewards; None: those of the transcripts.
    """
    samples, own = _samples_of(transcripts, limits), None
    if any(each.mask is not None for each in transcripts):
        own = np.asarray(samples.mask)
    completions = Completions.of_samples(prompts, samples, own)
    if limits.needs.routes is not None:
        routes = [np.asarray(each.routes) for each in transcripts]
        completions = completions._replace(routes=routes)
    lasts = [
        each.completion_ids[np.flatnonzero(each.sampled)[-1]] for each in transcripts
    ]
    by_turn = _by_turn(transcripts, limits) if limits.needs.turn_rewards else None
    return Sampled(
        prompts=prompts,
        completions=completions,
        samples=samples,
        graded=_graded_of(transcripts) if graded is None else graded,
        truncated=~np.isin(lasts, limits.ends.eos_ids),
        turns=np.array([each.turn_count for each in transcripts], np.int32),
        decoded=SlotUse(0, 0),
        by_turn=by_turn,
        transcripts=list(transcripts),
    )


def _samples_of(transcripts: Sequence[Transcript], limits: TranscriptLimits) -> Samples:
    slots = limits.completion_tokens
    tokens, lengths = padded([each.completion_ids for each in transcripts], slots)
    mask, logprobs = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, np.float32)
    supports = None
    if limits.support is not None:
        supports = np.full((*tokens.shape, limits.support), -1, np.int32)
    for i, each in enumerate(transcripts):
        mask[i, : lengths[i]] = each.sampled
        logprobs[i, : lengths[i]] = each.logprobs
        if supports is not None:
            for t, ids in enumerate(each.supports or ()):
                supports[i, t, : len(ids)] = ids
    arrays: Any = (tokens, mask, logprobs, supports, lengths)
    return Samples(*arrays)


def _by_turn(transcripts: Sequence[Transcript], limits: TranscriptLimits) -> ByTurn:
    rewards = np.zeros((len(transcripts), limits.turns), np.float32)
    of_token = np.zeros((len(transcripts), limits.completion_tokens), np.int32)
    for i, each in enumerate(transcripts):
        values = each.turn_rewards or ()
        rewards[i, : len(values)] = [np.nan if x is None else x for x in values]
        of_token[i, : len(each.completion_ids)] = each.turn_of_token
    return ByTurn(rewards, of_token)


def _graded_of(transcripts: Sequence[Transcript]) -> Graded:
    """The rewards that transcripts have; those by function if all have the same ones.

    A completion is right where its first reward by function is 1 or more, or else its
    reward.
    """
    values = _floats([each.reward for each in transcripts])
    names = {tuple(each.rewards or ()) for each in transcripts}
    parts, first = None, values
    if len(names) == 1 and (functions := names.pop()):
        table = [
            _floats([(t.rewards or {})[f] for t in transcripts]) for f in functions
        ]
        parts = dict(zip(functions, table, strict=True))
        first = np.full_like(values, np.nan)
        for column in reversed(table):
            first = np.where(np.isnan(column), first, column)
    right = np.where(np.isnan(values), values, first >= 1).astype(np.float32)
    return Graded(values, right, parts)


def _floats(numbers: Sequence[float | None]) -> np.ndarray:
    """Numbers as float32; NaN for None."""
    return np.array([np.nan if x is None else x for x in numbers], np.float32)


def select_groups(parts: Sequence[Sampled], prompts: int, group_size: int) -> Sampled:
    """The first `prompts` groups of `parts`, those whose rewards differ before others.

    Groups without any reward come last. This is dynamic sampling (Yu et al., 2025,
    arXiv:2503.14476, DAPO).
    """
    if len(parts) == 1:
        return parts[0]
    groups = chosen_groups(parts, prompts, group_size)
    rows = (groups[:, None] * group_size + np.arange(group_size)).ravel()
    return take(join(parts), rows)


def chosen_groups(
    parts: Sequence[Sampled], prompts: int, group_size: int
) -> np.ndarray:
    """Indices [prompts] of the groups that `select_groups` selects, in their order."""
    differ = np.concatenate([part.rewards_differ(group_size) for part in parts])
    rewarded = np.concatenate([part.rewarded(group_size) for part in parts])
    rank = np.where(differ, 0, np.where(rewarded, 1, 2))
    return np.sort(np.argsort(rank, kind="stable")[:prompts])
