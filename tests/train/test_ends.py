"""The end of a turn, wherever a run on conversations saves a model."""

import datetime
import functools
import json
import pathlib
import shutil

import pytest

from jaxmem import checkpoints
from jaxmem.commands import cli
from jaxmem.data.records import DataError
from jaxmem.train import results
from jaxmem.train.output.history import read_history
from tests.helpers import runs, texts
from tests.helpers.cases import slow

pytestmark = pytest.mark.usefixtures(
    "quick_compilation", "no_picture", "programs_of_module"
)
# Turns end with <pad>, which is not the end that the base model knows, </s>.
TEMPLATE = (
    "{{ strftime_now('%Y%m%d') }}{% for m in messages %}{{ m.role[0] + m.content }}"
    "<pad>{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
GIN = """
model.checkpoint = "qwen3"
data.source = "chat.jsonl"
data.sequence_length = 32
data.batch_size = 2
head.chunk = 32
optimizer.warmup_steps = 0
optimizer.schedule = "constant"
run.steps = 2
run.checkpoint_every = 2
run.compare_heads = False
run.out_dir = "run"
"""
TURN, EOS = 0, 2


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = texts.checkpoint("qwen3", tmp_path)
    named = {"eos_token": "</s>", "chat_template": TEMPLATE}
    (model / "tokenizer_config.json").write_text(json.dumps(named))
    turns = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "cc"}]
    line = json.dumps({"messages": turns}) + "\n"
    pathlib.Path("chat.jsonl").write_text(line * 8)
    pathlib.Path("sft.gin").write_text(GIN)
    assert checkpoints.end_ids(model) == (EOS,)
    return tmp_path


train = functools.partial(runs.train, "sft.gin")


def ends(path):
    said = json.loads(pathlib.Path(path, "generation_config.json").read_text())
    return said["eos_token_id"]


def exported(path, *options):
    shutil.rmtree("out", ignore_errors=True)
    assert cli.main(["export", path, "--out", "out", *options]) == 0
    return "out"


@pytest.mark.full
@pytest.mark.parametrize("streaming", [slow(False), True])
def test_whole_model_ends_its_turns(streaming):
    train(f"data.streaming={streaming}")
    assert ends("run/model") == [EOS, TURN]
    shutil.rmtree("run/model")  # as before the end of the run
    assert ends(exported("run")) == [EOS, TURN]


@pytest.mark.slow
def test_adapter_ends_its_turns():
    train("model.lora_rank=1")
    assert ends("run/adapter") == [EOS, TURN]
    assert ends(exported("run", "--merge")) == [EOS, TURN]
    shutil.rmtree("run/adapter")
    assert ends(exported("run")) == [EOS, TURN]
    assert ends(exported("run", "--merge")) == [EOS, TURN]


@pytest.mark.full
def test_texts_teach_no_end_of_a_turn():
    pathlib.Path("chat.jsonl").write_text(json.dumps({"text": "abc"}) + "\n")
    train()
    assert not pathlib.Path("run", results.END_OF_TURN).exists()
    assert ends("run/model") == EOS


class Clock(datetime.datetime):
    """A day of 2026."""

    day = 3

    @classmethod
    def now(cls, tz=None):
        return cls(2026, 5, cls.day, 12)


def losses(path):
    return [step.loss for step in read_history(pathlib.Path(path) / "metrics.jsonl")]


@pytest.mark.slow
def test_template_with_date_resumes_on_another_day(monkeypatch):
    monkeypatch.setattr(results.datetime, "datetime", Clock)
    train("run.steps=4", "run.out_dir=once")
    train()
    monkeypatch.setattr(Clock, "day", 4)
    train("run.steps=4")
    assert losses("run") == losses("once")
    pathlib.Path("run", results._STARTED).unlink()  # what the day is remembered by
    with pytest.raises(DataError, match="the saved position belongs to other data"):
        train("run.steps=5")
