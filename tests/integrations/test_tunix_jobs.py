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

from jaxmem.commands import cli
from jaxmem.train import configuration, jobs
from tests.helpers import own_models
from tests.helpers.kills import kill_before
from tests.helpers.own_models import JOBS, SIZES
from tests.helpers.shared_programs import one_program as one_program

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
FACTORY = f"{own_models.FOLDER / 'tunix_model.py'}:Qwen3"


# test_own_model has every job.
@pytest.mark.slow
@pytest.mark.parametrize("job", ["sft", "grpo"])
def test_tunix_model_is_trained_and_resumes_bitwise(
    job, tmp_path, monkeypatch, one_program
):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"{i} and {i * i}"}) + "\n" for i in range(40)]
    pathlib.Path("texts.jsonl").write_text("".join(lines))
    pathlib.Path("run.gin").write_text(
        SIZES + JOBS[job] + f"run.job = {job!r}\nmodel.factory = {FACTORY!r}\n"
    )

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
        command = ["generate", "whole", "1 and", "--max-new-tokens", "2"]
        assert cli.main([*command, "--trust-code"]) == 0
