"""Scores texts under a checkpoint: `jaxmem score`."""

from typing import TYPE_CHECKING

from jaxmem import _imports

if TYPE_CHECKING:
    from jaxmem.score.journal import Scores as Scores
    from jaxmem.score.run import ScoreConfig as ScoreConfig, score as score
    from jaxmem.score.summary import Summary as Summary

# At first use: the command line imports this package to parse its arguments.
__getattr__, __dir__ = _imports.lazy(
    __name__, Scores="journal", ScoreConfig="run", score="run", Summary="summary"
)
