"""Clients of inference engines that sample rollouts over HTTP: vLLM and SGLang.

They need the standard library and numpy only. `EnginePool` talks to several servers,
`WeightFolder` has the weights that they load.
"""

from jaxmem.train.jobs.rollout.engines.pool import ENGINES, EnginePool, connect
from jaxmem.train.jobs.rollout.engines.protocol import (
    Engine,
    EngineAnswer,
    EngineError,
    EngineInfo,
    EngineOptions,
    SamplingRequest,
)
from jaxmem.train.jobs.rollout.engines.weight_folder import WeightFolder

__all__ = [
    "ENGINES",
    "Engine",
    "EngineAnswer",
    "EngineError",
    "EngineInfo",
    "EngineOptions",
    "EnginePool",
    "SamplingRequest",
    "WeightFolder",
    "connect",
]
