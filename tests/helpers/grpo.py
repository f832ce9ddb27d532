"""A small GRPO job, its samples, and its loss in float64."""

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from jaxmem.data.documents import Batch
from jaxmem.data.tasks import TaskConfig
from jaxmem.models.decoder import Decoder, ModelConfig
from jaxmem.models.sampling import SamplingConfig
from jaxmem.models.training_head import HeadConfig
from jaxmem.train.jobs.config import GrpoJobConfig
from jaxmem.train.jobs.grpo import job as grpo
from jaxmem.train.jobs.policy_objective import (
    GrpoConfig,
    PolicyBatch,
)
from jaxmem.train.jobs.rollout.packed import Completions
from jaxmem.train.memory import RematConfig
from jaxmem.train.optimizer import OptimizerConfig
from jaxmem.train.output.progress import ProgressReport
from jaxmem.train.settings import RunConfig
from tests.helpers import runs
from tests.helpers.runs import changed, drawn

CONFIGS = Path(__file__).parents[2] / "configs"
# Two tokens a completion or three, of prompts of four to six; packed in rows of 16.
SMALL = GrpoJobConfig(
    task=TaskConfig(digits=1, answer="sum", reward="prefix"),
    sampling=SamplingConfig(max_new_tokens=3),
    grpo=GrpoConfig(
        prompts=8,
        group_size=4,
        minibatches=2,
        max_tokens_train=32,
        max_tokens_forward=64,
    ),
    model=ModelConfig().replaced(
        {
            "layers": 1,
            "hidden": 32,
            "ff": 48,
            "heads": 2,
            "kv_heads": 1,
            "head_dim": 16,
            "tied": False,
            "embedding.scaled": True,
        }
    ),
    head=HeadConfig(chunk=16),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1, weight_decay=0.0),
    run=RunConfig(job="grpo", steps=4, checkpoint_every=3, compare_heads=False),
    remat=RematConfig("none"),
)


def train(config, out_dir, **run):
    config = changed(config, run=dict(out_dir=str(out_dir), **run))
    return runs.run(config, "run.steps = 4\n")


def curve(result, *names):
    return np.array(
        [[getattr(step, name) for name in names] for step in result.history]
    )


def completions(rows=6, slots=3, seed=0):
    """Random prompts and completions of several lengths."""
    rng = np.random.default_rng(seed)
    prompts, sampled = (rng.integers(2, 14, (rows, n), np.int32) for n in (4, slots))
    prompt_lengths = rng.integers(2, 5, rows).astype(np.int32)
    lengths = rng.integers(1, slots + 1, rows).astype(np.int32)
    lengths[:2] = 1, slots
    return Completions.of(prompts, prompt_lengths, sampled, lengths), prompts


def softmax_stats(z, labels):
    """Log-probability, entropy and its kin in float64."""
    z = z.astype(np.float64)
    log_p = z - z.max(-1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    p = np.exp(log_p)
    chosen = np.take_along_axis(log_p, np.maximum(labels, 0)[..., None], -1)[..., 0]
    return chosen, -(p * log_p).sum(-1), (p**2).sum(-1)


def dense(config, z, made, normalizer):
    """The loss and the metrics of a micro-batch as the papers have them, in float64."""
    lp, entropy, squares = softmax_stats(z, made.batch.labels)
    live = made.batch.labels >= 0
    A, log_ratio = made.advantages, lp - made.old_logprob
    if config.loss == "gspo":
        log_ratio = made.sequence_log_ratio.astype(np.float64)
    low, high = config.clips or (1, np.inf)
    ratio = np.exp(log_ratio)
    if config.loss == "cispo":
        loss = -np.clip(ratio, 1 - low, 1 + high) * A * lp
        clipped = (ratio < 1 - low) | (ratio > 1 + high)
    elif config.loss == "sapo":
        tau = np.where(A > 0, 1.0, 1.05)
        loss, clipped = -A * 4 / tau / (1 + np.exp(-tau * (ratio - 1))), 0 * A
    else:
        loss = -np.minimum(ratio * A, np.clip(ratio, 1 - low, 1 + high) * A)
        clipped = np.where(A > 0, ratio > 1 + high, ratio < 1 - low) & (A != 0)
    if config.loss == "ppo_clip":  # the dual clip of verl's clip_ratio_c
        loss = np.where(A < 0, np.minimum(loss, -3 * A), loss)
        clipped |= (A < 0) & (ratio > 3)
    delta = made.ref_logprob - lp
    kl = np.exp(delta) - delta - 1
    loss += config.kl_coefficient * kl - config.entropy_coefficient * entropy
    told = {"logprob": lp, "kl": kl, "entropy": entropy, "sum_pi_squared": squares,
            "clip_fraction": clipped}  # fmt: skip
    total = np.sum(np.where(live, made.weights * loss, 0)) / normalizer
    return total, {name: np.where(live, value, 0) for name, value in told.items()}


@functools.cache
def random_micro_batch(vocab_size=14, shape=(3, 8)):
    """Numbers of a policy that has moved, so that some ratios are clipped."""
    rng = np.random.default_rng(3)
    labels = rng.integers(0, vocab_size, shape).astype(np.int32)
    labels[rng.random(shape) < 0.4] = -1
    ids = [rng.integers(0, vocab_size, shape).astype(np.int32), labels]
    ids += [
        np.ones(shape, np.int32),
        np.tile(np.arange(shape[1], dtype=np.int32), (3, 1)),
    ]
    floats = [rng.normal(size=shape).astype("f4") for _ in range(2)]
    old, ref = (np.log(1 / vocab_size) + 0.5 * x.astype("f4") for x in floats)
    old[0, :2] -= 3  # beyond the dual clip
    advantages = rng.normal(size=shape).astype("f4")
    weights = rng.uniform(0.5, 1, shape).astype("f4")
    return PolicyBatch(Batch(*ids), old, advantages, weights, ref)


def head_and_hidden(softcap=None):
    config = SMALL.model.replaced({"vocab_size": 14, "logits.softcap": softcap})
    made = drawn(lambda: Decoder(config, SMALL.head, rngs=nnx.Rngs(0)))
    hidden = 0.3 * np.random.default_rng(1).normal(size=(3, 8, config.hidden))
    return nnx.merge(*made).head, jnp.asarray(hidden, jnp.float32)


def job_with(program, compiled):
    """A job of a program that is compiled already."""
    job = grpo.Grpo(program.config)
    job.program, program.compile = program, lambda: compiled
    job.open()
    job.compile(ProgressReport(Console(), 1, 0, 1))
    return job
