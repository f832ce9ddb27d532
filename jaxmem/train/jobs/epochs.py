"""Steps of a run whose length is given in epochs."""

import dataclasses
import math
from typing import TypeVar

from jaxmem.data import documents, pairs, teacher_streams
from jaxmem.train import starting
from jaxmem.train.jobs import teachers
from jaxmem.train.jobs.config import (
    Config,
    DistillJobConfig,
    DpoJobConfig,
    GrpoJobConfig,
)
from jaxmem.train.jobs.questions import OwnPrompts, task_of

_Job = TypeVar("_Job", Config, DpoJobConfig, GrpoJobConfig, DistillJobConfig)


def with_steps(config: _Job) -> _Job:
    """Return the config with `run.steps` as `run.epochs` says; itself without it.

    The data are read and tokenised once more for that.

    Raises:
        ValueError: the data cannot be used, or have no end.
    """
    epochs = config.run.epochs
    if epochs is None:
        return config
    steps = math.ceil(epochs * _steps_of_an_epoch(config))
    run = dataclasses.replace(config.run, steps=max(steps, 1), epochs=None)
    return dataclasses.replace(config, run=run)


def _steps_of_an_epoch(
    config: Config | DpoJobConfig | GrpoJobConfig | DistillJobConfig,
) -> float:
    if isinstance(config, GrpoJobConfig) or (
        isinstance(config, DistillJobConfig) and config.is_on_policy
    ):
        task = task_of(config)
        if not isinstance(task, OwnPrompts):
            raise ValueError(
                f"run.epochs={config.run.epochs} needs a task.source of prompts: sums "
                "have no end"
            )
        grpo = isinstance(config, GrpoJobConfig)
        section = config.grpo if grpo else config.distill
        return len(task) / section.prompts
    model = config.model
    if isinstance(config, DistillJobConfig):
        model = teachers.reading(config)
        if config.distill.mode == "offline":
            file = teacher_streams.opened(config.data)
            examples = teacher_streams.examples(file, config.data, epochs=1)
            return sum(1 for _ in examples) / config.run.accumulate
    tokenizer = starting.load_tokenizer(config.data, model)
    template = starting.load_template(config.data, model, tokenizer)
    if isinstance(config, DpoJobConfig):
        long = config.dpo.drop_long
        training, _ = pairs.load_pairs(config.data, tokenizer, template, long)
        count = len(training) / config.data.batch_size
    else:
        batches = documents.batches(config.data, tokenizer, epochs=1, template=template)
        count = sum(1 for _ in batches)
    return count / config.run.accumulate
