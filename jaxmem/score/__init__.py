"""Scores texts under a checkpoint: `jaxmem score`."""

from jaxmem.score.journal import Scores as Scores
from jaxmem.score.run import ScoreConfig as ScoreConfig, score as score
from jaxmem.score.summary import Summary as Summary
