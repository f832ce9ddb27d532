"""Completes prompts with a saved model: `jaxmem generate`."""

import typing

from jaxmem.base import imports

if typing.TYPE_CHECKING:
    from jaxmem.generate.batch import generate_file as generate_file
    from jaxmem.generate.completions import (
        Completion as Completion,
        Generator as Generator,
    )
    from jaxmem.generate.config import GenerateConfig as GenerateConfig
    from jaxmem.generate.model import Model as Model, load as load
else:  # at first use: the command line imports this package for its arguments
    __getattr__, __dir__ = imports.lazy(
        __name__,
        generate_file="batch",
        Completion="completions",
        Generator="completions",
        GenerateConfig="config",
        Model="model",
        load="model",
    )
