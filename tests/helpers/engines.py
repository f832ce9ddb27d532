"""Options and a request for clients of `EngineStub`."""

import dataclasses

from jaxmem.models.sampling import SamplingConfig
from jaxmem.train.jobs.rollout.engines import EngineOptions, SamplingRequest
from tests.helpers.engine_stub import EOS, VOCAB

REQUEST = SamplingRequest([5, 12, 6, 13], 2, 6, seed=7)


SOON = 0.8  # a timeout, for tests of what never succeeds


def options(**changes):
    """Options of a run, and the list of the lines that it prints."""
    said = []
    result = EngineOptions(
        sampling=SamplingConfig(max_new_tokens=6),
        eos_ids=(EOS,),
        vocab_size=VOCAB,
        run="sums",
        timeout=60.0,
        say=said.append,
        first_pause=0.01,
        token=None,
    )
    return dataclasses.replace(result, **changes), said
