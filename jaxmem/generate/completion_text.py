"""The text of a completion as its tokens arrive, up to a stop string."""

from collections.abc import Sequence

import tokenizers

_INCOMPLETE = "\ufffd"  # what a part of a character decodes to
_CONTEXT = 8  # tokens of the prompt that are decoded before the completion


class CompletionText:
    """The text of one completion.

    It is decoded after the end of the prompt, since some tokenizers drop the space at
    the start of what they decode.

    Args:
        tokenizer: of the model.
        prompt: ids before the completion.
        stops: strings that end it, and that it then lacks.

    Attributes:
        ids: the tokens; with a stop string, up to the one that completes it.
        stop: the stop string that was reached; None without one.
        whole: all of the text.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str],
    ):
        self._tokenizer, self._stops = tokenizer, stops
        self._context = list(prompt[-_CONTEXT:])
        self._before = tokenizer.decode(self._context)
        self.ids: list[int] = []
        self.stop: str | None = None
        self.whole = ""

    def add(self, ids: Sequence[int]) -> None:
        """Add tokens; those after the end of a stop string are dropped."""
        # A stop string may end inside any of them.
        for part in [[id_] for id_ in ids] if self._stops else [list(ids)]:
            if self.stop is not None:
                return
            self.ids += part
            self.whole = self._decoded()
            self._find_stop()

    def _decoded(self) -> str:
        whole = self._tokenizer.decode(self._context + self.ids)
        if whole.startswith(self._before):
            return whole[len(self._before) :]
        return self._tokenizer.decode(self.ids)

    def _find_stop(self) -> None:
        ends = [(self.whole.find(stop), stop) for stop in self._stops]
        earliest = min((pair for pair in ends if pair[0] >= 0), default=None)
        if earliest is not None:
            offset, self.stop = earliest
            self.whole = self.whole[:offset]

    @property
    def settled(self) -> str:
        """The start of the text that no further token can change."""
        if self.stop is not None:
            return self.whole
        text = self.whole.rstrip(_INCOMPLETE)
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that a stop string may start with."""
    return next(
        (n for n in range(min(len(stop) - 1, len(text)), 0, -1)
         if text.endswith(stop[:n])), 0,
    )  # fmt: skip
