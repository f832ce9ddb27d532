"""Options of `jaxmem eval`."""

import dataclasses
from typing import Annotated

from jaxmem.base import options
from jaxmem.base.command_options import Flag, ModelOptions, TemplateOptions
from jaxmem.base.ranges import integers


@dataclasses.dataclass(frozen=True)
class EvaluateRequest(TemplateOptions, ModelOptions):
    """Options of the command: a model, tasks and limits."""

    _: dataclasses.KW_ONLY
    tasks: Annotated[
        str, Flag(metavar="NAME,…"), "names of lm-eval's tasks, separated by commas"
    ]
    include: Annotated[
        str | None, Flag(metavar="FOLDER"), "folder with YAML files of your own tasks"
    ] = None
    chat: Annotated[bool, "format each prompt with the chat template"] = False
    shots: Annotated[
        int | None,
        integers(0),
        "number of examples in each prompt (default: the task's number)",
    ] = None
    limit: Annotated[
        int | None,
        Flag(parse=options.count),
        "number of documents to read of each task (default: all)",
    ] = None
    max_tokens: Annotated[
        int,
        Flag(parse=options.count),
        "number of tokens in a micro-batch, with padding (default {default})",
    ] = 4096
    batch_size: Annotated[
        int,
        Flag(parse=options.count),
        "number of completions to sample at a time (default {default})",
    ] = 8
    out: Annotated[
        str | None,
        Flag(metavar="FILE.json"),
        "file for the results (default: eval.json in the run's directory)",
    ] = None

    def __post_init__(self):
        super().__post_init__()
        if self.chat_template_kwargs is not None and not self.chat:
            raise ValueError("--chat-template-kwargs needs --chat")
