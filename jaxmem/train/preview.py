"""Prints records of a job's data as tokens: which of them the loss counts."""

import numpy as np
from rich.console import Console
from rich.text import Text

from jaxmem.train.jobs.job import Job

_COUNTED, _OTHER = "bold green", "dim"
_MOST = 400  # maximum tokens shown per record


def show(job: Job, count: int, console: Console) -> None:
    """Print the first records as tokens, and statistics of all.

    Tokens that the loss counts are green; without colours they are enclosed in ⟦ ⟧.
    """

    def say(line: str | Text) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    for item in job.records(count):
        if isinstance(item, str):
            say(item)
            continue
        counted = np.zeros(len(item.tokens), bool)
        about = item.about
        if item.labels is not None:
            counted[1:] = item.labels[:-1] >= 0
            about = f"the loss counts {int(counted.sum()):,}"
        say(f"{item.name}: {len(item.tokens):,} tokens, {about}")
        say(_color_tokens(job, item.tokens[:_MOST], counted[:_MOST], console))


def _color_tokens(
    job: Job, tokens: np.ndarray, counted: np.ndarray, console: Console
) -> Text:
    """Runs of tokens of one kind, decoded together: a character may take several."""
    colored, plain = Text(), console.color_system is None
    starts = [0, *(np.flatnonzero(counted[1:] != counted[:-1]) + 1), len(tokens)]
    for start, stop in zip(starts, starts[1:], strict=False):
        text, counts = job.reads.text(tokens[start:stop]), bool(counted[start])
        if plain and counts:
            text = f"⟦{text}⟧"
        colored.append(text, _COUNTED if counts else _OTHER)
    return colored
