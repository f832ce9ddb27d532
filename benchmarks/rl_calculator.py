"""A calculator as an environment: products that a model cannot know.

A small decoder learns from text to guess products of two numbers, to ask a calculator
in one of five first turns, and to repeat what it answers. Then GRPO rewards right
answers, in conversations with `task.environment="calculator"` or in single completions.

The text has the ends of completions as they are in conversations. A vocabulary that a
run makes itself reads "<eos>" as letters, and that of a checkpoint as one token: a run
of one step comes first, whose checkpoint the others read.
"""

import contextlib
import json
import pathlib
import random
import tempfile
import time
from collections.abc import Iterator

import numpy as np
from rich.console import Console

from jaxmem.train import configuration, jobs

# Bytes alone: a token across the end of a prompt or of a reply, such as "=[", would be
# in the text and never in a conversation.
VOCABULARY = 259
ASKS = 0.2  # share of the first turns of the text that ask, instead of guessing
START = (
    "model.layers=2 model.hidden=64 model.ff=192 model.head_dim=16 "
    f"data.source=text.jsonl data.vocab_size={VOCABULARY} run.steps=1 "
    "run.compare_heads=False run.out_dir=start eval.every=None run.checkpoint_every=1"
)
WEIGHTS = "model.lora_rank=0 model.dtype=float32 model.param_dtype=float32"
TEXT = (
    f"{WEIGHTS} model.checkpoint=start/model data.source=text.jsonl "
    "data.sequence_length=64 data.batch_size=16 data.held_out=0 "
    "run.compare_heads=False run.out_dir=text eval.every=None run.accumulate=1 "
    "optimizer.learning_rate=5e-3 optimizer.warmup_fraction=0.25 optimizer.b2=0.98"
)
POLICY = (
    f"{WEIGHTS} model.checkpoint=text/model task.source=records.jsonl "
    "task.max_prompt_tokens=8 task.held_out=0.1 sampling.max_new_tokens=10 "
    "grpo.max_tokens_train=1024 grpo.max_tokens_forward=1024 grpo.group_size=16 "
    "optimizer.learning_rate=1e-3 run.checkpoint_every=30 task.reward=exact"
)
TOOLS = {
    "calculator": "task.environment=calculator task.max_turns=2 "
    "task.max_reply_tokens=8",
    "none": "",
}


def write_data(seed):
    """Write text to start from, and records of products."""
    rng = random.Random(seed)

    def product():
        a, b = rng.randrange(40, 100), rng.randrange(40, 100)
        return f"{a}*{b}", a * b

    with open("text.jsonl", "w") as text:
        for _ in range(8000):
            question, value = product()
            prompt, answer = f"{question}=", f"[{question}]"
            if rng.random() < 0.4:
                prompt, answer = f"{question}=[{question}]<eos>{value}=", str(value)
            elif rng.random() >= ASKS:
                answer = str(rng.randrange(1600, 9802))
            record = {"prompt": prompt, "response": f"{answer}<eos>"}
            text.write(json.dumps(record) + "\n")
    with open("records.jsonl", "w") as records:
        for _ in range(600):
            question, value = product()
            record = {"prompt": f"{question}=", "answer": str(value)}
            records.write(json.dumps(record) + "\n")


def train(name, overrides):
    """(the history of a run of a shipped configuration, its CPU seconds)."""
    pathlib.Path("job.gin").write_text(f'include "{name}"')
    config, text = configuration.load("job.gin", overrides.split())
    start = time.process_time()
    result = jobs.train(config, text, Console(quiet=True))
    return result.history, time.process_time() - start


def calculator(seeds, text_steps, rollouts) -> Iterator[tuple[dict, list[float]]]:
    """A row and the rewards by rollout of each seed, with the tool and without."""
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            write_data(seed)
            train("sft_stdlib.gin", f"{START} run.seed={seed}")
            steps = f"run.steps={text_steps} run.checkpoint_every={text_steps}"
            train("sft_lora.gin", f"{TEXT} {steps} run.seed={seed}")
            for tool, more in TOOLS.items():
                yield of_policy(tool, seed, rollouts, more)


def of_policy(tool, seed, rollouts, more):
    """(row, rewards by rollout) of a policy that is trained from the text's weights."""
    every = max(rollouts // 2, 1)
    given = f"run.seed={seed} run.steps={rollouts} run.out_dir={tool}"
    given += f" eval.every={every} {more}"
    history, seconds = train("grpo_checkpoint.gin", f"{POLICY} {given}")
    held_out = [s.held_out_reward for s in history if s.held_out_reward is not None]
    rewards = [step.reward for step in history]
    return {
        "tool": tool, "seed": seed, "rollouts": rollouts,
        "first_reward": f"{np.mean(rewards[:3]):.3f}",
        "last_reward": f"{np.mean(rewards[-5:]):.3f}",
        "held_out_reward": f"{held_out[-1]:.3f}",
        "run_cpu_seconds": f"{seconds:.0f}",
    }, rewards  # fmt: skip


def draw(path, curves):
    """Draw reward by rollout, a line per (tool, seed)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    panel, colors = figure.subplots(), {"calculator": "C0", "none": "C1"}
    for (tool, seed), rewards in curves.items():
        label = {"calculator": "with the tool", "none": "without"}[tool]
        panel.plot(
            range(1, len(rewards) + 1), rewards, color=colors[tool], alpha=0.7,
            linewidth=1, label=None if seed else label,
        )  # fmt: skip
    panel.set(xlabel="rollout", ylabel="reward", ylim=(-0.02, 1.02))
    panel.grid(alpha=0.3)
    panel.legend()
    figure.savefig(path, dpi=150)
