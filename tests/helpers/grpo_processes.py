"""Programs and user code of GRPO in two processes."""

# `jaxmem train`, whose jobs write digests of what each rollout gives.
PROGRAM = """
import hashlib, json, sys
import jax, numpy as np
from jaxmem.commands import cli
from jaxmem.train.jobs.grpo import job as grpo

roll_out = grpo.Grpo._roll_out

def listened(job, *arguments):
    rollout = roll_out(job, *arguments)
    with open(f"learned-{jax.process_index()}.jsonl", "a") as file:
        made = [rollout.samples.tokens, rollout.samples.mask, rollout.advantages]
        digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in made))
        told = [digest.hexdigest(), rollout.sampled["resampled"]]
        print(json.dumps(told), file=file)
    return rollout

grpo.Grpo._roll_out = listened
sys.exit(cli.main(sys.argv[1:]))
"""
OWN = """
import hashlib, json, os, random

def told(name, values):
    with open(name, "a") as file:
        for value in values:
            print(json.dumps([os.getpid(), value]), file=file)

def chance(completions, **_):
    rewards = [random.random() for _ in completions]
    told("rewards.jsonl", rewards)
    return rewards

def rarely(completions, **_):
    rewards = [float(random.random() < 0.02) for _ in completions]
    told("rewards.jsonl", rewards)
    return rewards

def length(completions, **_):
    rewards = [len(text) / 8 for text in completions]
    told("rewards.jsonl", rewards)
    return rewards

def fails(completions, **_):
    raise OSError("the judge of process %d is away" % os.getpid())

def wander(record, complete):
    # One or two completions, a reply and a reward, by chance.
    told("calls.jsonl", [record["prompt"]])
    parts = [complete(record["prompt_ids"])]
    if random.random() < 0.5:
        parts.append(complete.encode("".join(random.choices("abc", k=3))))
        said = [i for part in parts for i in getattr(part, "ids", part)]
        parts.append(complete([*record["prompt_ids"], *said]))
    return {**complete.joined(*parts), "reward": random.random()}

def falls(record, complete):
    raise OSError("the agent of process %d is away" % os.getpid())

class Chance:
    def reset(self, record):
        told("resets.jsonl", [record["prompt"]])
        return record["prompt"]

    def step(self, said):
        reply = "".join(random.choices("abc", k=random.randint(1, 5)))
        told("steps.jsonl", [[said, reply]])
        return reply, random.random(), False
"""
GIN = """
task.source = "prompts.jsonl"
task.max_prompt_tokens = 6
sampling.max_new_tokens = 3
grpo.prompts = 2
grpo.group_size = 4
grpo.max_tokens_train = 64
grpo.max_tokens_forward = 64
grpo.loss = "dr_grpo"
head.chunk = 32
optimizer.learning_rate = 2e-2
optimizer.warmup_steps = 0
optimizer.weight_decay = 0.0
run.job = "grpo"
run.steps = 2
run.checkpoint_every = 1
run.compare_heads = False
run.out_dir = "two"
mesh.data = 2
model.checkpoint = "llama"
"""
ENVIRONMENT = (
    "task.environment=own.py:Chance", "task.max_turns=2", "task.max_reply_tokens=6",
)  # fmt: skip
ROLLOUT = "task.max_turns=2", "task.max_reply_tokens=6"
