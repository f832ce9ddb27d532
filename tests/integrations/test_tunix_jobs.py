"""A Tunix model is trained by the jobs, through `model.factory`; resume is bitwise.

Runs where google-tunix is installed.
"""

import io
import json
import pathlib
import warnings

import flax
import pytest
from rich.console import Console

from jaxmem import cli
from jaxmem.train import configuration, jobs
from tests.train.jobs.kills import kill_before

EAGER = getattr(flax.config, "flax_always_shard_variable", None)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Tunix's own, at import
    pytest.importorskip("tunix.models.qwen3.model", reason="needs google-tunix")

if EAGER is not None:  # Tunix turns it off for the whole process
    flax.config.update("flax_always_shard_variable", EAGER)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Tunix's own
    pytest.mark.usefixtures("quick_compilation", "no_picture"),
]
FACTORY = str(pathlib.Path(__file__).with_name("tunix_model.py")) + ":Qwen3"
GIN = f"""
model.factory = "{FACTORY}"
model.layers = 1
model.hidden = 16
model.heads = 2
model.kv_heads = 1
model.head_dim = 8
model.ff = 24
optimizer.learning_rate = 1e-2
optimizer.warmup_steps = 0
run.steps = 4
run.checkpoint_every = 2
run.compare_heads = False
run.out_dir = "run"
"""
JOBS = {
    "sft": """
run.job = "sft"
data.source = "texts.jsonl"
data.vocab_size = 280
data.sequence_length = 16
data.batch_size = 4
data.held_out = 0.2
data.cache_dir = "."
""",
    "grpo": """
run.job = "grpo"
task.digits = 1
task.answer = "sum"
task.reward = "prefix"
sampling.max_new_tokens = 3
grpo.prompts = 8
grpo.group_size = 4
grpo.max_tokens_train = 64
grpo.max_tokens_forward = 64
grpo.row_lengths = (16,)
""",
}


@pytest.mark.parametrize("job", JOBS)
def test_a_tunix_model_is_trained_and_resumes_bitwise(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"{i} and {i * i}"}) + "\n" for i in range(40)]
    pathlib.Path("texts.jsonl").write_text("".join(lines))
    pathlib.Path("run.gin").write_text(GIN + JOBS[job])

    def train(out_dir):
        loaded = configuration.load("run.gin", [f"run.out_dir={out_dir}"])
        return jobs.train(*loaded, Console(file=io.StringIO())).history

    whole = train("whole")
    assert len(whole) == 4 and whole[-1].loss != whole[0].loss
    kill_before(4, jobs.JOBS[job], monkeypatch, lambda: train("cut"))
    again = train("cut")
    assert [step.loss for step in again] == [step.loss for step in whole]
    if job == "sft":
        assert whole[-1].loss < whole[0].loss
        assert cli.main(["generate", "whole", "1 and", "--max-new-tokens", "2"]) == 0
