"""Completions in progress: tokens, and the versions of the weights that drew them."""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxmem.models.slot_decoding import SlotTokens
from jaxmem.serve.completion_request import CompletionRequest
from jaxmem.serve.request_error import RequestError

Finish = Literal["stop", "length", "abort"]


@dataclasses.dataclass(eq=False)
class ServedRow:
    """One completion, which grows by parts.

    Attributes:
        index: its number in the answer.
        top: of each token, the most probable ids with their log-probabilities.
        versions: versions of the weights, with the number of tokens that each drew.
        finish: why it ended; None: it has not.
        routes: experts of the tokens that were read, by version; empty: not recorded.
    """

    job: "CompletionJob"
    index: int
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top: list[dict[int, float]] = dataclasses.field(default_factory=list)
    versions: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    finish: Finish | None = None
    routes: list[np.ndarray] = dataclasses.field(default_factory=list)

    @property
    def prompt(self) -> Sequence[int]:
        """Ids of its prompt."""
        return self.job.request.prompts[self.index // self.job.request.n]

    @property
    def room(self) -> int:
        """Tokens that it may still get."""
        return self.job.request.max_tokens - len(self.ids)

    @property
    def seed(self) -> int:
        """The seed of its draws: as in vLLM, choice i of a prompt adds i."""
        return self.job.request.seed + self.index % self.job.request.n

    @property
    def stop_reason(self) -> int | None:
        """The id that ended it, if it is one that only the request names."""
        ends = self.job.request.stop_ids
        return self.ids[-1] if self.finish == "stop" and self.ids[-1] in ends else None

    def add(self, tokens: SlotTokens, slot: int, version: str) -> None:
        """Add the tokens of a slot in a part, all drawn by one version."""
        drawn = tokens.drawn
        steps = np.flatnonzero(drawn.mask[:, slot])
        self.ids += drawn.tokens[steps, slot].tolist()
        self.logprobs += drawn.logprobs[steps, slot].tolist()
        if tokens.top_ids is not None and tokens.top_logprobs is not None:
            top = tokens.top_ids[steps, slot], tokens.top_logprobs[steps, slot]
            for ids, logprobs in zip(*(x.tolist() for x in top), strict=True):
                pairs = zip(ids, logprobs, strict=True)
                self.top.append({id_: x for id_, x in pairs if id_ >= 0})
        if len(steps):
            before = 0
            if self.versions and self.versions[-1][0] == version:
                before = self.versions.pop()[1]
            self.versions.append((version, before + len(steps)))
        if tokens.ended[slot]:
            ends = self.job.request.options.end_ids
            self.finish = "stop" if self.ids[-1] in ends else "length"

    def add_routes(self, routes: np.ndarray) -> None:
        """Add routes [T, ...] by position of the tokens that were read since before.

        Those of earlier tokens belong to the weights that drew what follows them.
        """
        known = sum(map(len, self.routes))
        self.routes.append(routes[known : len(self.prompt) + len(self.ids) - 1])


class CompletionJob:
    """All rows of a request, for which a thread waits.

    Attributes:
        rows: in the order of the answer.
        error: why they have no completions; None: they have.
    """

    def __init__(self, request: CompletionRequest):
        self.request = request
        count = len(request.prompts) * request.n
        self.rows = [ServedRow(self, index) for index in range(count)]
        self.error: RequestError | None = None
        self._is_done = threading.Event()

    def settle(self) -> None:
        """Wake the waiting thread if all rows have ended, or none will."""
        if self.error is not None or all(row.finish for row in self.rows):
            self._is_done.set()

    def fail(self, error: RequestError) -> None:
        """End all rows by an error."""
        self.error = self.error or error
        self.settle()

    def wait(self, seconds: float) -> bool:
        """True once the rows have ended; False after so many seconds."""
        return self._is_done.wait(seconds)
