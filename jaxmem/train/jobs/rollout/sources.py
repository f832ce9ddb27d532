"""Sources of a run's completions: its own sampler, or rollouts that were recorded."""

import abc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxmem.train.jobs.config import GrpoJobConfig
from jaxmem.train.jobs.rollout.packed import Completions, Logprobs
from jaxmem.train.jobs.rollout.prompt_tasks import Dialogues
from jaxmem.train.jobs.rollout.prompts import Task
from jaxmem.train.jobs.rollout.recorded import RecordedRollouts
from jaxmem.train.jobs.rollout.samples import Sampled
from jaxmem.train.jobs.rollout.sampling_program import SamplingProgram
from jaxmem.train.jobs.rollout.turns import SamplePrograms, Turns
from jaxmem.train.jobs.rollout_metrics import Rollout

Weights = tuple[Any, Any]  # trained ones, frozen ones
# Key in the saved state: rollouts with prompts that no finished step has taken.
AHEAD = "ahead"
# The trainer's log-probabilities of the given rows of a rollout, at a temperature.
Measure = Callable[[np.ndarray, float], Logprobs]


class RolloutSource(abc.ABC):
    """A source of the completions that a run learns from, step by step.

    Attributes:
        task: the prompts, and the rewards of completions.
        next: number of the first prompt that no finished step has taken.
    """

    def __init__(self, config: GrpoJobConfig, task: Task):
        self.config, self.task, self.next = config, task, 0

    def begin(self) -> None:
        """Start what runs beside the steps; all processes call it before the first."""
        return None

    @abc.abstractmethod
    def sampled(self, step: int, attempt: int, weights: Weights) -> Sampled:
        """Completions of `grpo.prompts` prompts with their rewards, in all processes.

        Args:
            step: number of the step, from 1.
            attempt: 0, or the number of a further rollout of `grpo.resample`.
            weights: of the policy before the step.
        """

    def updated(self, step: int, weights: Weights) -> None:
        """Take the weights that a step has made, which sample for the next one.

        An error is raised by the next call of `sampled`, because the step is done.
        """
        del step, weights

    def finish(self, step: int, attempts: int) -> None:
        """Count the prompts of a step, which took so many rollouts, as taken."""
        del step
        self.next += attempts * self.config.grpo.prompts

    def verify(self, rollout: Rollout, measure: Measure) -> str | None:
        """Compare the first rollout with the trainer's own log-probabilities.

        Args:
            rollout: of a step, before its update.
            measure: returns the trainer's log-probabilities at a temperature.

        Returns:
            A line to print, or None.

        Raises:
            ValueError: they are not of the same model and sampling.
        """
        del rollout, measure
        return None

    def metrics(self) -> dict[str, Any]:
        """Fields of `PolicyMetrics` about the last step's completions."""
        return {}

    def close(self) -> None:
        """End what runs beside the steps."""
        return None

    def state(self) -> dict[str, Any]:
        """The position in the prompts, as JSON-able values."""
        return self.task.state(self.next)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned.

        Rollouts that an engine had sampled ahead are sampled again by a source that
        does not.
        """
        position = self.task.position(state)
        self.next = min([position, *(saved["start"] for saved in state.get(AHEAD, []))])

    def start_of(self, attempt: int) -> int:
        """The number of the first prompt of an attempt of the next step."""
        return self.next + attempt * self.config.grpo.prompts


class RecordedSource(RolloutSource):
    """Rollouts of files, in their order."""

    task: RecordedRollouts

    def sampled(self, step: int, attempt: int, weights: Weights) -> Sampled:
        return self.task.sampled(self.start_of(attempt), self.config.grpo.prompts)


class OwnSampler(RolloutSource):
    """Completions that the trained model samples itself, on the run's own devices.

    Args:
        config: of the run.
        task: of the run.
        program: shapes of the sampler.
        programs: returns the compiled sampler.
    """

    def __init__(
        self,
        config: GrpoJobConfig,
        task: Task,
        program: SamplingProgram,
        programs: Callable[[], SamplePrograms],
    ):
        super().__init__(config, task)
        self._program, self._programs = program, programs

    def sampled(self, step: int, attempt: int, weights: Weights) -> Sampled:
        grpo = self.config.grpo
        prompts = self.task.ask(self.start_of(attempt), grpo.prompts)
        prompts = prompts.repeated(grpo.group_size)
        sample = Turns(self._program, self._programs(), weights, (step, attempt))
        if isinstance(self.task, Dialogues):
            sampled = self.task.sampled(prompts, sample)
            return sampled._replace(decoded=sample.decoded)
        samples = sample(prompts.ids, prompts.lengths, 0)
        completions = Completions.of_samples(prompts, samples)
        lengths = completions.lengths
        last = np.take_along_axis(completions.sampled, lengths[:, None] - 1, axis=1)
        return Sampled(
            prompts=prompts,
            completions=completions,
            samples=samples._replace(routes=None),
            graded=self.task.grade(prompts, completions),
            truncated=~np.isin(last[:, 0], self._program.ends.eos_ids),
            turns=np.ones_like(lengths),
            decoded=sample.decoded,
        )
