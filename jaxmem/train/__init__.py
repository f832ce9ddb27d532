"""Training jobs, configured by gin files or from Python.

>>> from jaxmem import train
>>> config = train.make("sft_lora", model={"checkpoint": "Qwen/Qwen3-0.6B"},
...                     data={"source": [{"text": "Once"}]})  # doctest: +SKIP
>>> result = train.train(config)  # doctest: +SKIP
"""

import typing

from jaxmem.base import imports

imports.require(
    __name__, "train", "gin", "grain", "optax", "orbax", "rich", "tokenizers"
)

if typing.TYPE_CHECKING:
    from jaxmem.train import (
        configuration as configuration,
        jobs as jobs,
    )
    from jaxmem.train.configuration import load as load, make as make
    from jaxmem.train.jobs import train as train
    from jaxmem.train.jobs.config import (
        DistillJobConfig as DistillJobConfig,
        DpoJobConfig as DpoJobConfig,
        GrpoJobConfig as GrpoJobConfig,
        SftJobConfig as SftJobConfig,
    )
else:
    __getattr__, __dir__ = imports.lazy(
        __name__,
        "configuration",
        "jobs",
        load="configuration",
        make="configuration",
        train="jobs",
        DistillJobConfig="jobs.config",
        DpoJobConfig="jobs.config",
        GrpoJobConfig="jobs.config",
        SftJobConfig="jobs.config",
    )
