"""Scores texts under a checkpoint: `jaxmem score`."""

import typing

from jaxmem.base import imports

if typing.TYPE_CHECKING:
    from jaxmem.score.config import ScoreConfig as ScoreConfig
    from jaxmem.score.document_scores import Scores as Scores
    from jaxmem.score.run import score as score
    from jaxmem.score.summary import Summary as Summary
else:  # at first use: the command line imports this package for its arguments
    __getattr__, __dir__ = imports.lazy(
        __name__,
        Scores="document_scores",
        ScoreConfig="config",
        score="run",
        Summary="summary",
    )
