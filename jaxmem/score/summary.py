"""Summarises scores: a table, and a histogram of -logprob."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from rich.table import Table

# In nats: a token in the first bin is almost certain, one in the last bin very
# unlikely.
_EDGES = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, math.inf)
_BAR = 40  # characters of the longest bar


@dataclasses.dataclass(frozen=True)
class Summary:
    """Statistics over documents and their scored tokens."""

    documents: int
    tokens: int
    mean_logprob: float  # nats per token; NaN if there are no tokens
    mean_entropy: float
    median_perplexity: float  # over documents
    histogram: tuple[int, ...]  # number of tokens by -logprob, between the edges

    @property
    def perplexity(self) -> float:
        """The perplexity of all tokens together."""
        return math.exp(-self.mean_logprob)

    def table(self, seconds: float, tokens: int) -> Table:
        """A table for a console; this process read `tokens` tokens in `seconds`."""
        table = Table(title="Scores", title_justify="left", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for name, value in (
            ("documents", f"{self.documents:,}"),
            ("tokens scored", f"{self.tokens:,}"),
            ("log-probability, nats per token", f"{self.mean_logprob:.4f}"),
            ("entropy, nats per token", f"{self.mean_entropy:.4f}"),
            ("perplexity of all tokens", f"{self.perplexity:,.3f}"),
            ("perplexity of the median document", f"{self.median_perplexity:,.3f}"),
            ("tokens read per second", f"{tokens / seconds:,.0f}" if tokens else "-"),
        ):
            table.add_row(name, value)
        return table

    def bars(self) -> Table:
        """The histogram as a table for a console."""
        table = Table(title="Tokens by -logprob, nats", title_justify="left", box=None)
        table.add_column("from", justify="right")
        table.add_column("tokens", justify="right")
        table.add_column("", no_wrap=True)
        most = max(*self.histogram, 1)
        for edge, count in zip(_EDGES, self.histogram, strict=False):
            bar = "█" * math.ceil(_BAR * count / most)
            table.add_row(f"{edge:g}", f"{count:,}", bar)
        return table


def summarise(records: Iterable[Mapping[str, Any]]) -> Summary:
    """Summarise the records of a journal, reading one at a time."""
    logprob = entropy = 0.0
    histogram = np.zeros(len(_EDGES) - 1, np.int64)
    documents, perplexities = 0, []
    for record in records:
        documents += 1
        logprobs = np.array(record["logprobs"], np.float64)
        logprob += logprobs.sum()
        entropy += math.fsum(record["entropies"])
        # Rounding may make a log-probability slightly positive.
        histogram += np.histogram(np.maximum(-logprobs, 0), _EDGES)[0]
        if record["perplexity"] is not None:
            perplexities.append(record["perplexity"])
    tokens = int(histogram.sum())
    return Summary(
        documents,
        tokens,
        logprob / tokens if tokens else math.nan,
        entropy / tokens if tokens else math.nan,
        float(np.median(perplexities)) if perplexities else math.nan,
        tuple(histogram.tolist()),
    )
