"""Metrics of steps, and the summary of a run and its memory."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from rich.table import Table

from jaxmem.models.training_head import HeadConfig

_MIB, _GIB = 2**20, 2**30


class StepMetrics(NamedTuple):
    """The numbers of one optimizer step; one line of metrics.jsonl."""

    step: int  # steps done, this one included
    loss: float  # nats per token
    tokens: int  # that count in the loss
    tokens_per_second: float
    grad_norm: float  # global, before clipping
    learning_rate: float
    seconds: float  # wall time since the end of the step before it
    mfu: float | None = None  # model FLOPs utilisation; None on an unknown device
    gradient_samples: int | None = None  # of the head, a token; None: exact gradients
    held_out_loss: float | None = None  # nats per token; None where not evaluated
    held_out_perplexity: float | None = None  # e to the power of it
    # `models.balance.report`; None for a model without experts
    routers: dict[str, float] | None = None
    backend: str | None = None  # of the head's loss: "xla" or "hopper"
    # Estimated error of the head's ln Σ e^z in nats, mean over the tokens; None where
    # its forward pass is exact
    forward_error: float | None = None

    @property
    def line(self) -> str:
        """The step's line in the progress report."""
        mfu = "" if self.mfu is None else f"  MFU {self.mfu:.1%}"
        return f"loss {self.loss:.4f}  {self.tokens_per_second:,.0f} tokens/s{mfu}"


class PolicyMetrics(NamedTuple):
    """The numbers of one rollout and its updates; one line of metrics.jsonl.

    Means are over the tokens sampled, and over the updates of the step; None where no
    token was measured, as where all completions are masked.
    """

    step: int  # rollouts done, this one included
    # Rewards, lengths, `truncated` and `turns` are of all that was sampled in the step,
    # and rewards of the samples that have one.
    reward: float  # mean over the samples
    accuracy: float  # share of samples whose (first) reward is 1 or more
    degenerate: float  # share of groups whose rewards are all equal
    loss: float  # the minimised loss, mean over the updates
    kl: float | None  # to the initial weights, k3; None without them
    entropy: float | None  # of the policy, nats
    sum_pi_squared: float | None  # of the policy, the collision probability
    clip_fraction: float | None  # share of tokens that the clip leaves no gradient
    grad_norm: float  # global, before clipping, mean over the updates
    learning_rate: float
    response_length: float  # tokens sampled, mean over the samples
    mismatch_mean: float | None  # |trainer's - sampler's log-probability|, nats
    mismatch_max: float | None  # the largest of these differences, nats
    tokens: int  # of prompts and responses that are learned from
    tokens_per_second: float
    rollout_seconds: float  # sampling and rewards
    old_seconds: float  # log-probabilities that no update measures by itself
    reference_seconds: float  # log-probabilities of the initial weights
    update_seconds: float
    seconds: float  # all of them
    peak_gib: float | None  # on the device since the start; None where it cannot tell
    gradient_samples: int | None = None  # of the head, a token; None: exact gradients
    # mean by function, where there are several; None: it gave none
    rewards: dict[str, float | None] | None = None
    held_out_reward: float | None = None  # at temperature 0; None where not evaluated
    held_out_accuracy: float | None = None  # as `held_out_reward`
    # The quantiles of mismatch_mean's differences.
    mismatch_p50: float | None = None
    mismatch_p95: float | None = None
    mismatch_p99: float | None = None
    # Shares of sampled tokens whose ratio of the trainer's probability to the sampler's
    # is outside [0.8, 1.25], outside [0.5, 2] and inside [0.9, 1.1].
    ratios_outside_1_25: float | None = None
    ratios_outside_2: float | None = None
    ratios_inside_1_1: float | None = None
    # The last one with the trainer's probability over the vocabulary, not within the
    # support that the token was drawn from; None where the sampler does not truncate.
    unreplayed_inside_1_1: float | None = None
    ratios_inside_1_01: float | None = None  # inside [0.99, 1.01]
    ratios_inside_strict: float | None = None  # inside [0.999, 1.002]
    dropped: float | None = None  # share that grpo.correction drops; None without one
    # share of the tokens that grpo.token_fraction keeps, and the largest weight of one,
    # 1 / probability of being kept; None with a fraction of 1
    token_share: float | None = None
    token_weight_max: float | None = None
    # share of the experts that updates replay, and their own routers would not choose
    rerouted: float | None = None
    truncated: float | None = None  # share of completions that end at the limit
    resampled: int | None = None  # further rollouts, by grpo.resample
    # `reward`, `accuracy`, `degenerate`, `truncated` and `response_length` of the
    # groups that grpo.resample has kept; None without it
    kept: dict[str, float | None] | None = None
    # samples without a reward, from which nothing is learned
    unrewarded: int | None = None
    held_out_unrewarded: int | None = None  # held-out prompts without a reward
    # Completions without an answer that task.reward="math" can read, which earn 0; None
    # where no reward tells that.
    unparsed: int | None = None
    held_out_unparsed: int | None = None
    # Means over eval.samples completions of each held-out prompt, by their names:
    # held_out_avg@8, held_out_pass@1, ...; None where not evaluated.
    held_out_at_k: dict[str, float | None] | None = None
    turns: float | None = None  # completions of a conversation, mean; None without any
    busy: float | None = None  # share of slots with a completion, of all steps' slots
    # Of rollouts of an engine; None without one. Updates between the weights of a
    # sampled token and those that learn from it, mean and maximum; sampled completions
    # that wait for their step; seconds without a request to the engine; its tokens per
    # second while it had requests.
    staleness_mean: float | None = None
    staleness_max: int | None = None
    versions_per_completion: float | None = None  # of the weights, mean
    queued: int | None = None
    push_seconds: float | None = None  # to give the engine the new weights
    # of them, those of writing, and of each step of the slowest server
    push_seconds_by_phase: dict[str, float] | None = None
    waiting_seconds: float | None = None  # for completions
    engine_idle_seconds: float | None = None
    engine_tokens_per_second: float | None = None
    # mean ids in a token's support; None where the sampler does not truncate
    support_mean: float | None = None
    # share of tokens whose support has as many ids as sampling.support allows; None
    # where that limit cannot cut any
    support_full: float | None = None
    routers: dict[str, float] | None = None  # as in `StepMetrics`
    backend: str | None = None  # of the head's loss: "xla" or "hopper"
    forward_error: float | None = None  # as in `StepMetrics`
    # With head.gradient=("recorded", k), else None: mean absolute error of
    # log-probabilities in nats, measured at some tokens by an exact forward pass;
    # micro-batches of the updates; those of them that took an exact forward pass
    # because of grpo.max_head_error; tokens whose error has no estimate.
    head_error: float | None = None
    head_checked: int | None = None
    head_rejected: int | None = None
    head_without_estimate: int | None = None

    spread = "held_out_at_k"  # its entries are fields of their own in files

    @property
    def line(self) -> str:
        """The step's line in the progress report."""
        entropy = "" if self.entropy is None else f"entropy {self.entropy:.3f}  "
        return (
            f"reward {self.reward:.3f}  {entropy}{self.tokens_per_second:,.0f} tokens/s"
        )


class PreferenceMetrics(NamedTuple):
    """The numbers of one step on pairs of answers; one line of metrics.jsonl.

    An answer's reward is beta (ln p - ln p of the reference), as DPO defines it.
    """

    step: int  # steps done, this one included
    loss: float  # mean over the pairs
    margin: float  # reward of the chosen answer less the rejected one's, mean
    accuracy: float  # share of pairs whose margin is above 0
    chosen_reward: float  # mean
    rejected_reward: float  # mean
    pairs: int
    tokens: int  # of answers, that count
    tokens_per_second: float
    grad_norm: float  # global, before clipping
    learning_rate: float
    seconds: float  # wall time: reading data, the step, reading the loss back
    held_out_loss: float | None = None  # None where not evaluated
    held_out_margin: float | None = None
    held_out_accuracy: float | None = None
    routers: dict[str, float] | None = None  # as in `StepMetrics`
    backend: str | None = None  # of the answers' log-probabilities

    @property
    def line(self) -> str:
        """The step's line in the progress report."""
        return (
            f"loss {self.loss:.4f}  margin {self.margin:.3f}  accuracy "
            f"{self.accuracy:.2f}  {self.tokens_per_second:,.0f} tokens/s"
        )


class DistillMetrics(NamedTuple):
    """The numbers of one step of a student; one line of metrics.jsonl.

    Means are over the tokens that count, in nats.
    """

    step: int  # steps done, this one included
    # the minimised sum: divergence + distill.loss_weight * ce, and with rewards the
    # policy's loss, whose value says little, times distill.reward_weight
    loss: float
    divergence: float  # of the student from its teacher, at distill.temperature
    ce: float  # cross-entropy of the data; of a policy's samples, at temperature 1
    entropy: float  # of the student, at temperature 1
    tokens: int  # that count
    tokens_per_second: float
    grad_norm: float  # global, before clipping
    learning_rate: float
    data_seconds: float  # reading data, or sampling completions
    teacher_seconds: float  # its hidden states, until they are in the host's memory
    update_seconds: float
    seconds: float  # all of them
    peak_gib: float | None = None  # on the device since the start; None: not told
    response_length: float | None = None  # tokens sampled, mean over the completions
    busy: float | None = None  # as in `PolicyMetrics`
    # divergence + distill.loss_weight * ce - distill.reward_weight * reward of what is
    # held out; None where not evaluated
    held_out_loss: float | None = None
    held_out_divergence: float | None = None
    held_out_ce: float | None = None
    # As in `PolicyMetrics`; None without rewards.
    reward: float | None = None
    accuracy: float | None = None
    degenerate: float | None = None
    rewards: dict[str, float | None] | None = None
    unrewarded: int | None = None  # which learn from the teacher alone
    held_out_reward: float | None = None  # of samples, not of the most likely tokens
    held_out_accuracy: float | None = None
    held_out_unrewarded: int | None = None
    unparsed: int | None = None
    held_out_unparsed: int | None = None
    routers: dict[str, float] | None = None  # as in `StepMetrics`
    backend: str | None = None  # of the cross-entropy and the policy's loss

    @property
    def line(self) -> str:
        """The step's line in the progress report."""
        reward = "" if self.reward is None else f"reward {self.reward:.3f}  "
        return (
            f"{reward}divergence {self.divergence:.4f}  ce {self.ce:.4f}  "
            f"{self.tokens_per_second:,.0f} tokens/s"
        )


class AnyMetrics(Protocol):
    """The numbers of a step of any job, a NamedTuple; one line of metrics.jsonl."""

    @property
    def step(self) -> int:
        """Steps done, this one included."""
        ...

    @property
    def loss(self) -> float:
        """The value that is minimised."""
        ...

    @property
    def grad_norm(self) -> float:
        """Global norm of the gradient, before clipping."""
        ...

    @property
    def tokens_per_second(self) -> float:
        """Tokens that the step processed per second."""
        ...

    @property
    def line(self) -> str:
        """The step's line in the progress report."""
        ...

    def _asdict(self) -> dict[str, Any]: ...


def tokens_per_second(history: Sequence[AnyMetrics]) -> float:
    """Median over the steps, which is robust to slow ones; 0 without steps."""
    return statistics.median(s.tokens_per_second for s in history) if history else 0.0


class Memory(NamedTuple):
    """Bytes that the compiler reserves for a program."""

    temporary: int  # one arena, held while the program runs
    peak: int  # the arena, arguments and results; a donated argument counts once


def memory_of(compiled: Any) -> Memory:
    """Memory of a compiled program as the compiler reports it; nothing is run."""
    sizes = compiled.memory_analysis()
    if sizes is None:
        raise NotImplementedError(
            "the compiler of this device does not report a program's memory; set "
            "run.compare_heads=False"
        )
    # Not `peak_memory_in_bytes`, which excludes temporaries on the CPU.
    peak = (
        sizes.temp_size_in_bytes
        + sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes
    )
    return Memory(sizes.temp_size_in_bytes, peak)


class HeadCost(NamedTuple):
    """The memory of one way to compute the head."""

    head: Memory  # loss and gradients of the head alone, one micro-batch
    step: Memory  # the whole train step


def head_costs(
    trained: HeadConfig, step: Any, compile_step: Callable, trace_head: Callable
) -> dict[str, HeadCost]:
    """Memory by `head.logits`; the step that trained is not compiled again."""
    heads = {logits: trained.using(logits) for logits in ("fused", "materialised")}
    return {
        logits: HeadCost(
            head=memory_of(trace_head(head).lower().compile()),
            step=memory_of(step if head == trained else compile_step(head)),
        )
        for logits, head in heads.items()
    }


def costs_of(memory: Mapping[str, Mapping[str, Any]]) -> dict[str, HeadCost]:
    """The costs that summary.json has, by `head.logits`."""
    return {
        name: HeadCost(Memory(**cost["head"]), Memory(**cost["step"]))
        for name, cost in memory.items()
    }


def cost_table(costs: Mapping[str, HeadCost]) -> Table:
    """A table that compares the memory of heads, in MiB."""
    table = Table(title="Memory by head (MiB, from the compiler)")
    table.add_column()
    for name in costs:
        table.add_column(name, justify="right")
    rows = {
        "head only, temporary": lambda cost: cost.head.temporary,
        "train step, temporary": lambda cost: cost.step.temporary,
        "train step, peak": lambda cost: cost.step.peak,
    }
    for label, read in rows.items():
        table.add_row(label, *(f"{read(cost) / _MIB:,.1f}" for cost in costs.values()))
    return table


class PhaseCost(NamedTuple):
    """Time and memory of one phase of a step."""

    name: str
    seconds: float  # median over the steps
    memory: Memory  # of the largest of its programs


def phase_table(phases: Sequence[PhaseCost]) -> Table:
    """A table with one row per phase."""
    table = Table(title="A step by phase (memory from the compiler)")
    table.add_column()
    for column in ("seconds, median", "temporary, GiB", "peak, GiB"):
        table.add_column(column, justify="right")
    for phase in phases:
        sizes = (f"{size / _GIB:,.3f}" for size in phase.memory)
        table.add_row(phase.name, f"{phase.seconds:,.4f}", *sizes)
    peak = peak_gib()
    if peak is not None:
        table.add_row("the device's own peak", "", "", f"{peak:,.3f}")
    return table


def peak_gib() -> float | None:
    """Peak memory of the device since the start; None if it is not reported."""
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return None if peak is None else peak / _GIB


def last_of(history: Sequence[Any], *names: str) -> dict[str, Any]:
    """Fields of the last step that was evaluated; None if none was."""
    evaluated = [step for step in history if step.held_out_loss is not None]
    last = evaluated[-1] if evaluated else None
    return {name: getattr(last, name, None) for name in names}
