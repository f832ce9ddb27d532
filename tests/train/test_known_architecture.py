"""Models that no config.json can name: told before training, read from the run."""

import pathlib

import pytest

from jaxmem.base import hub
from jaxmem.commands import cli
from jaxmem.models.config import ModelConfig
from jaxmem.train import configuration, known_architecture, publishing, saved
from jaxmem.train.jobs import job_of
from tests.helpers import runs

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")

UNKNOWN = {"logits.softcap": 3.0}
REASON = "LlamaForCausalLM cannot have logits.softcap=3.0"
GIN = """
data.source = "text.txt"
data.sequence_length = 16
data.batch_size = 2
data.vocab_size = 270
model.layers = 1
model.hidden = 16
model.ff = 24
model.heads = 2
model.kv_heads = 1
model.head_dim = 8
run.steps = 1
run.compare_heads = False
run.out_dir = "run"
"""


@pytest.fixture
def gin(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "\n\n".join(f"text of number {i}" for i in range(40))
    pathlib.Path("text.txt").write_text(text)
    pathlib.Path("run.gin").write_text(GIN)
    return "run.gin"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"embedding.scaled": True},  # becomes part of the table
        {"checkpoint": "DIR", **UNKNOWN},  # the checkpoint's config.json is read
    ],
)
def test_warning_is_of_models_that_no_config_names(changes):
    assert known_architecture.warning(ModelConfig().replaced(changes), True) is None


@pytest.mark.parametrize(
    ("changes", "has_checkpoints", "expected"),
    [
        (UNKNOWN, True, ["no model/", REASON, "score and eval read", "change these"]),
        (UNKNOWN, False, ["checkpoint_every=None keeps no checkpoint either", "lost"]),
        (UNKNOWN | {"lora_rank": 2}, True, ["leave adapters without their base"]),
        ({"factory": "a.py:M"}, True, ["model.factory='a.py:M'", "jaxmem export wri"]),
    ],
)
def test_warning_says_what_is_left_and_what_to_do(changes, has_checkpoints, expected):
    model = ModelConfig().replaced(changes)
    line = known_architecture.warning(model, has_checkpoints)
    assert line is not None and all(part in line for part in expected)


def test_program_tells_of_it_before_training(gin):
    config, _ = configuration.load(gin, ["model.logits.softcap=3.0"])
    lines = [*job_of(config).make_program(300).lines()]
    assert sum(REASON in line for line in lines) == 1


def test_push_of_no_model_is_refused_before_training(gin):
    overrides = ["model.logits.softcap=3.0", "run.push=me/model"]
    config, _ = configuration.load(gin, overrides)
    with pytest.raises(hub.HubError, match=f"no model to upload, .*{REASON}; leave ru"):
        publishing.check_push(job_of(config).config)


@pytest.mark.full
def test_run_of_an_unknown_architecture_is_read_from_its_checkpoints(gin, capsys):
    _, said = runs.train(gin, "model.logits.softcap=3.0")
    told, saving = (said.index(x) for x in ("will leave no model/", "is not saved: "))
    assert told < said.index("step 1/1") < saving
    with saved.opened("run") as source:
        decoder = source.load()
        assert decoder.config.logits.softcap == 3.0 and REASON in source.unknown
    assert cli.main(["export", "run", "--out", "out"]) == 2
    assert f"{REASON}; jaxmem generate, score and eval" in capsys.readouterr().err
    assert cli.main(["score", "run", "text.txt", "--out", "s.jsonl"]) == 0
    assert len(pathlib.Path("s.jsonl").read_text().splitlines()) == 40
