"""A calculator as an environment: products that a model cannot know.

    python -m benchmarks.run_calculator

A small decoder learns from text to guess products of two numbers, to ask a calculator,
and to repeat what it answers. Then GRPO rewards right answers, in conversations with
`task.environment="calculator"` or in single completions. Minutes on two CPU cores.
"""

import argparse
import json
import os
import pathlib
import random
import tempfile
import time

import numpy as np
from rich.console import Console

from benchmarks import results
from jaxmem.train import configuration, jobs

SIZES = "model.layers=2 model.hidden=64 model.ff=192 model.head_dim=16"
TEXT = (
    f"{SIZES} data.source=text.jsonl data.vocab_size=270 data.sequence_length=64 "
    "data.batch_size=16 run.steps=1000 run.compare_heads=False run.out_dir=text "
    "eval.every=None run.checkpoint_every=1000"
)
POLICY = (
    "model.checkpoint=text/model model.lora_rank=0 model.dtype=float32 "
    "model.param_dtype=float32 task.source=records.jsonl task.max_prompt_tokens=8 "
    "task.held_out=0.1 sampling.max_new_tokens=10 grpo.max_tokens_train=1024 "
    "grpo.max_tokens_forward=1024 grpo.group_size=16 optimizer.learning_rate=1e-3 "
    "run.checkpoint_every=40 eval.every=20 task.reward=exact"
)
TOOL = "task.environment=calculator task.max_turns=2 task.max_reply_tokens=8"


def write_data(seed):
    """Text to start from, and records of products."""
    rng = random.Random(seed)

    def product():
        a, b = rng.randrange(10, 100), rng.randrange(10, 100)
        return f"{a}*{b}", a * b

    with open("text.jsonl", "w") as text:
        for _ in range(4000):
            asked, value = product()
            prompt, answer = f"{asked}=", f"[{asked}]"
            if rng.random() < 0.5:
                prompt, answer = f"{asked}=[{asked}]<eos>{value}=", str(value)
            elif rng.random() < 0.5:
                answer = str(rng.randrange(100, 9801))
            text.write(json.dumps({"prompt": prompt, "response": answer}) + "\n")
    with open("records.jsonl", "w") as records:
        for _ in range(600):
            asked, value = product()
            record = {"prompt": f"{asked}=", "answer": str(value)}
            records.write(json.dumps(record) + "\n")


def train(name, overrides):
    """One run of a shipped configuration, and its seconds of CPU."""
    pathlib.Path("job.gin").write_text(f'include "{name}"')
    config, text = configuration.load("job.gin", overrides.split())
    start = time.process_time()
    result = jobs.train(config, text, Console(quiet=True))
    return result.history, time.process_time() - start


def measure(seed, steps):
    """Rows of one seed: with the tool and without."""
    write_data(seed)
    train("sft_stdlib.gin", f"{TEXT} run.seed={seed}")
    for tool, more in (("calculator", TOOL), ("none", "")):
        given = f"{POLICY} {more} run.seed={seed} run.steps={steps} run.out_dir={tool}"
        history, seconds = train("grpo_checkpoint.gin", given)
        held_out = [s.held_out_reward for s in history if s.held_out_reward is not None]
        yield {
            "tool": tool, "seed": seed, "rollouts": steps,
            "first_reward": f"{np.mean([s.reward for s in history[:3]]):.3f}",
            "last_reward": f"{np.mean([s.reward for s in history[-5:]]):.3f}",
            "held_out_reward": f"{held_out[-1]:.3f}",
            "run_cpu_seconds": f"{seconds:.0f}",
        }  # fmt: skip


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80, help="rollouts of a run")
    parser.add_argument("--out", default="calculator_cpu.csv")
    given = parser.parse_args(arguments)
    rows = []
    for seed in range(given.seeds):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            for row in measure(seed, given.steps):
                print(row, flush=True)
                rows.append(row)
            os.chdir("/")
    print("wrote", results.write(given.out, rows))


if __name__ == "__main__":
    main()
