"""One form of a completion, whatever has sampled it, and its line of JSON.

    {"prompt_ids": [...], "completion_ids": [...], "logprobs": [...], "reward": 1.0}

A run's own sampler, an engine, a file of recorded rollouts and a user's rollout
function all make a `Transcript` of a prompt and of the tokens after it.
"""

import base64
import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmem.base import messages
from jaxmem.data import rewards
from jaxmem.data.completion_ends import Ends
from jaxmem.data.records import DataError
from jaxmem.data.tasks import TaskConfig
from jaxmem.models import route_records
from jaxmem.models.config import ModelConfig
from jaxmem.models.sampling import SamplingConfig

_LARGEST_LOGPROB = 1e-3  # of a probability of 1, rounded


@dataclasses.dataclass(frozen=True, eq=False)
class Transcript:
    """A prompt and the tokens after it, of which a policy has sampled at least one.

    Raises:
        DataError: fields contradict one another; the message begins with `where`.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]  # sampled, or said by others
    logprobs: Sequence[float]  # one per token of `completion_ids`; 0 where mask is 0
    reward: float | None = None  # None: none, or not yet
    rewards: Mapping[str, float | None] | None = None  # by function
    # 1 for tokens that the policy sampled, 0 for those of others; None: all sampled
    mask: Sequence[int] | None = None
    # index of each token's turn, which counts where mask is 1; None: a turn is a run of
    # sampled tokens
    turns: Sequence[int] | None = None
    turn_rewards: Sequence[float | None] | None = None  # one a turn
    # ids that each token was drawn from; [] where mask is 0
    supports: Sequence[Sequence[int]] | None = None
    # experts of the tokens that are read, all but the last: [tokens, layers, experts]
    routes: np.ndarray | None = None
    # spans over `completion_ids`: version of the sampling weights, number of tokens
    versions: Sequence[tuple[int, int]] | None = None
    where: str = ""  # the record's name, in messages

    def __post_init__(self):
        for key in ("prompt_ids", "completion_ids"):
            ids = getattr(self, key)
            self.require(_are_integers(ids), f"{key} must be a list of ids", ids)
            self.require(bool(ids), f"{key} has 0 ids; at least 1 is needed")
        self._check_mask()
        self._check_logprobs()
        self._check_turns()
        self._check_rewards()
        self._check_supports()
        self._check_routes()
        self._check_versions()

    def require(self, good: bool, expected: str, *got: Any) -> None:
        """Raise a DataError unless a field is good."""
        if not good:
            shown = "".join(f", got {messages.short(value)}" for value in got)
            raise DataError(f"{self.where}: {expected}{shown}")

    def _check_mask(self) -> None:
        mask, length = self.mask, len(self.completion_ids)
        if mask is None:
            return
        good = _are_integers(mask) and len(mask) == length and set(mask) <= {0, 1}
        expected = f"mask must be {length} numbers 0 or 1, one per token"
        self.require(good, f"{expected} of completion_ids", mask)
        self.require(1 in mask, "mask is 0 everywhere, so that nothing is learned")

    def _check_logprobs(self) -> None:
        values, length = self.logprobs, len(self.completion_ids)
        good = isinstance(values, Sequence) and len(values) == length
        good = good and all(_is_number(x) and x <= _LARGEST_LOGPROB for x in values)
        expected = f"logprobs must be {length} log-probabilities, one per token of "
        self.require(good, f"{expected}completion_ids", values)
        for value, sampled in zip(values, self.sampled, strict=True):
            expected = "logprobs must be 0 where mask is 0"
            self.require(bool(sampled) or value == 0, expected, value)

    def _check_turns(self) -> None:
        turns, length = self.turns, len(self.completion_ids)
        if turns is not None:
            good = _are_integers(turns) and len(turns) == length
            expected = (
                f"turns must be {length} indices, one per token of completion_ids"
            )
            self.require(good, expected, turns)
            steps = np.diff(self.turn_of_token[self.sampled], prepend=0)
            good = steps[0] == 0 and set(steps.tolist()) <= {0, 1}
            expected = "turns of sampled tokens must be 0, 1, ... without a gap"
            self.require(good, expected, turns)
        if (given := self.turn_rewards) is not None:
            numbers = isinstance(given, Sequence) and all(map(_is_reward, given))
            good = numbers and len(given) == self.turn_count
            expected = f"turn_rewards must be {self.turn_count} finite numbers or null"
            self.require(good, f"{expected}, one a turn", given)
            good = self.reward is None or None not in given
            self.require(good, "turn_rewards has null, so that reward must be null")

    def _check_rewards(self) -> None:
        expected = "reward must be a finite number or null"
        self.require(_is_reward(self.reward), expected, self.reward)
        parts = self.rewards
        good = parts is None or (
            isinstance(parts, Mapping) and all(map(_is_reward, parts.values()))
        )
        self.require(good, "rewards must be numbers or null by function", parts)
        for value in (self.reward, *(self.turn_rewards or ()), *(parts or {}).values()):
            try:
                rewards.checked(value or 0.0)
            except ValueError as error:
                raise DataError(f"{self.where}: reward is {error}") from error

    def _check_supports(self) -> None:
        supports, length = self.supports, len(self.completion_ids)
        if supports is None:
            return
        good = isinstance(supports, Sequence) and len(supports) == length
        expected = f"supports must be {length} lists of ids, one per token of "
        self.require(
            good and all(map(_are_integers, supports)),
            f"{expected}completion_ids",
            supports,
        )
        for token, ids, sampled in zip(
            self.completion_ids, supports, self.sampled, strict=True
        ):
            if not sampled:
                self.require(not ids, "supports must be [] where mask is 0", ids)
                continue
            good = token in ids and len(set(ids)) == len(ids)
            expected = f"the support of token {token} must contain the token, each id "
            self.require(good, f"{expected}once", ids)

    def _check_routes(self) -> None:
        if (routes := self.routes) is None:
            return
        read = len(self.prompt_ids) + len(self.completion_ids) - 1
        good = routes.ndim == 3 and routes.dtype.kind in "iu" and len(routes) == read
        expected = f"routes must be integers [{read} tokens, layers, experts]: of the "
        got = f"{routes.dtype}{list(routes.shape)}"
        what = "prompt and of completion_ids without the last"
        self.require(good, f"{expected}{what}, got {got}")

    def _check_versions(self) -> None:
        spans, length = self.versions, len(self.completion_ids)
        if spans is None:
            return
        good = isinstance(spans, Sequence) and all(
            _are_integers(span) and len(span) == 2 and span[1] > 0 for span in spans
        )
        expected = "versions must be [version, number of tokens] of each span"
        self.require(good and sum(n for _, n in spans) == length, (
            f"{expected}, {length} tokens in all"
        ), spans)  # fmt: skip

    @property
    def sampled(self) -> np.ndarray:
        """Booleans [tokens], True for tokens of `completion_ids` that were sampled."""
        if self.mask is None:
            return np.ones(len(self.completion_ids), bool)
        return np.array(self.mask, bool)

    @property
    def turn_of_token(self) -> np.ndarray:
        """Index [tokens] of each token's turn; any number where mask is 0."""
        if self.turns is not None:
            return np.array(self.turns)
        begins = np.diff(self.sampled.astype(int), prepend=0) == 1
        return np.maximum(np.cumsum(begins) - 1, 0)

    @property
    def turn_count(self) -> int:
        """Completions of the conversation."""
        return int(self.turn_of_token[self.sampled].max()) + 1

    def with_mask(self) -> "Transcript":
        """This transcript with a mask, of ones if it has none."""
        if self.mask is not None:
            return self
        return dataclasses.replace(self, mask=[1] * len(self.completion_ids))

    @classmethod
    def of_json(cls, fields: Mapping[str, Any], where: str = "") -> "Transcript":
        """The transcript of an object of JSON; other fields and nulls are ignored.

        Args:
            fields: as `to_json` returns them.
            where: a name for messages; empty: the one that `fields` has.

        Raises:
            DataError: a field is missing or has a wrong value.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        known: dict[str, Any] = {
            name: fields[name] for name in names if fields.get(name) is not None
        }
        where = known["where"] = str(where or known.get("where", ""))
        for key in ("prompt_ids", "completion_ids", "logprobs"):
            if key not in known:
                raise DataError(f'{where}: no "{key}"')
        if "routes" in known:
            known["routes"] = _decoded(known["routes"], where)
        return cls(**known)

    def to_json(self) -> dict[str, Any]:
        """The fields as an object of JSON, without those that are None, but `reward`.

        Numbers have float32's precision, in as few digits as identify them.
        """
        fields: dict[str, Any] = {
            "prompt_ids": list(self.prompt_ids),
            "completion_ids": list(self.completion_ids),
            "logprobs": [_shortest(x) for x in self.logprobs],
            "reward": _shortest(self.reward),
            "where": self.where,
        }
        if self.versions is not None:
            fields["versions"] = [list(span) for span in self.versions]
        if self.rewards is not None:
            fields["rewards"] = {k: _shortest(x) for k, x in self.rewards.items()}
        if self.mask is not None:
            fields["mask"] = list(self.mask)
        if self.supports is not None:
            fields["supports"] = [list(ids) for ids in self.supports]
        if self.turn_rewards is not None:
            fields["turn_rewards"] = [_shortest(x) for x in self.turn_rewards]
        if self.turns is not None:
            fields["turns"] = list(self.turns)
        if self.routes is not None:
            fields["routes"] = _encoded(self.routes)
        return fields


FIELDS = frozenset(field.name for field in dataclasses.fields(Transcript))


class TranscriptNeeds(NamedTuple):
    """Fields that a job's passes read beside tokens."""

    turn_rewards: bool = False  # of `grpo.turn_rewards`
    routes: ModelConfig | None = None  # of `grpo.replay_routing`; None: none are read


@dataclasses.dataclass(frozen=True)
class TranscriptLimits:
    """Ids and sizes that a run's transcripts may have, and fields that they need."""

    prompt_tokens: int
    completion_tokens: int  # after the prompt
    turns: int
    support: int | None  # maximum ids of a support; None: tokens have none
    ends: Ends
    needs: TranscriptNeeds = TranscriptNeeds()

    @classmethod
    def of(
        cls,
        task: TaskConfig,
        sampling: SamplingConfig,
        ends: Ends,
        needs: TranscriptNeeds,
    ) -> "TranscriptLimits":
        """The limits that a configuration sets."""
        return cls(
            task.max_prompt_tokens,
            task.conversation_length(sampling.max_new_tokens),
            task.turns,
            sampling.support_size,
            ends,
            needs,
        )

    def check(self, transcript: Transcript) -> None:
        """Raise a DataError unless a run with these limits can learn from it."""
        require, size = transcript.require, self.ends.size
        for key in ("prompt_ids", "completion_ids"):
            ids = getattr(transcript, key)
            good = all(0 <= i < size for i in ids)
            require(good, f"{key} must be ids in [0, {size})", ids)
        for key, most, source in (
            ("prompt_ids", self.prompt_tokens, "task.max_prompt_tokens"),
            ("completion_ids", self.completion_tokens, self._completion_limit),
        ):
            count = len(getattr(transcript, key))
            expected = f"{key} has {count} ids; at most {most} are possible: {source}"
            require(count <= most, expected)
        turns = transcript.turn_count
        expected = f"{turns} turns; at most task.max_turns={self.turns} are possible"
        require(turns <= self.turns, expected)
        self._check_support_sizes(transcript)
        if self.needs.turn_rewards:
            expected = 'no "turn_rewards", which grpo.turn_rewards=True compares'
            require(transcript.turn_rewards is not None, expected)
        if self.needs.routes is not None:
            self._check_experts(transcript, self.needs.routes)

    @property
    def _completion_limit(self) -> str:
        """Keys that determine `completion_tokens`."""
        if self.turns == 1:
            return "sampling.max_new_tokens; task.max_turns allows conversations"
        return (
            f"task.max_turns={self.turns} of sampling.max_new_tokens, with "
            "task.max_reply_tokens between them"
        )

    def _check_support_sizes(self, transcript: Transcript) -> None:
        require, supports = transcript.require, transcript.supports
        if self.support is None:
            values = "with the values of the sampler of these rollouts"
            expected = f"supports need sampling.top_k, top_p or min_p {values}"
            return require(supports is None, expected)
        count = len(transcript.completion_ids)
        expected = f"supports must be {count} lists of ids, one per token of "
        require(
            supports is not None,
            f"{expected}completion_ids, because sampling truncates",
        )
        for ids in supports or ():
            good = all(0 <= i < self.ends.size for i in ids)
            require(good, f"supports must be ids in [0, {self.ends.size})", ids)
            expected = f"a support must have at most {self.support} ids, by "
            good = len(ids) <= self.support
            require(good, f"{expected}sampling.top_k or sampling.support", ids)

    def _check_experts(self, transcript: Transcript, model: ModelConfig) -> None:
        require, routes = transcript.require, transcript.routes
        if routes is None:
            return require(False, 'no "routes", which grpo.replay_routing=True replays')
        expected = route_records.struct(model, (1, len(routes))).shape[1:]
        meaning = "tokens, layers with experts, experts of a token"
        good = routes.shape == expected
        require(good, f"routes must be {expected}, [{meaning}]", routes.shape)
        most = model.experts.count or 0
        good = bool((routes >= 0).all() and (routes < most).all())
        require(good, f"routes must be numbers of experts in [0, {most})")


def _are_integers(values: Any) -> bool:
    """True for a sequence of integers that are at least 0."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return False
    return all(type(x) is int and x >= 0 for x in values)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_reward(value: Any) -> bool:
    return value is None or _is_number(value)


def _shortest(value: float | None) -> float | None:
    """A float32 in as few digits as identify it; None for None or NaN."""
    number = math.nan if value is None else float(str(np.float32(value)))
    return None if math.isnan(number) else number


def _encoded(array: np.ndarray) -> str:
    """An array as a .npy file in base64."""
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(array))
    return base64.b64encode(file.getvalue()).decode("ascii")


def _decoded(text: Any, where: str) -> np.ndarray:
    """The array of a .npy file in base64."""
    try:
        file = io.BytesIO(base64.b64decode(text, validate=True))
        return np.load(file, allow_pickle=False)
    except (ValueError, TypeError, EOFError, OSError) as error:
        raise DataError(
            f"{where}: routes must be a .npy file in base64: {messages.reason(error)}"
        ) from error
