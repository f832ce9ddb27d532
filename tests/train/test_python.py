"""Configurations and runs from Python, without gin files."""

import pickle
from pathlib import Path

import pytest

from jaxmem import train
from jaxmem.base import caches
from jaxmem.data import documents, python_records
from jaxmem.data.python_records import RecordsError
from jaxmem.train import jobs
from jaxmem.train.configuration import ConfigError

RECORDS = [{"text": "Once upon a time"}, {"text": "é", "number": 1.5}]


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_make_equals_load():
    made = train.make(
        "sft_lora",
        model={"checkpoint": Path("x"), "lora_targets": ["query", "value"]},
        data={"source": ["a.jsonl", "b.jsonl"]},
        run={"steps": 4},
    )
    overrides = [
        "model.checkpoint=x", "model.lora_targets=('query', 'value')",
        "data.source=('a.jsonl', 'b.jsonl')", "run.steps=4",
    ]  # fmt: skip
    assert made == train.load("sft_lora.gin", overrides)[0]
    assert type(made) is train.SftJobConfig and made.run.epochs is None
    assert pickle.loads(pickle.dumps(made)) == made


def test_make_starts_from_a_job_or_a_file():
    Path("own.gin").write_text("run.steps = 9\nmodel.ff = 32")
    assert train.make("own.gin", model={"ff": None}).model.ff == 448
    assert type(train.make("grpo_arithmetic")) is train.GrpoJobConfig
    dpo = train.make("dpo", model={"checkpoint": "x"}, dpo={"loss": "ipo"})
    assert isinstance(dpo, train.DpoJobConfig) and dpo.dpo.loss == "ipo"


@pytest.mark.parametrize(
    ("name", "sections", "expected"),
    [
        ("sft", {"model": {"hiden": 1}}, "unknown key 'model.hiden'; did you mean"),
        ("sft", {"run": {"steps": "x"}}, "make: run.steps must be int, got 'x' (str)"),
        ("sft", {"run": {"steps": 0}}, "configuration.make: run.steps must be at lea"),
        ("sft", {"run": 3}, "configuration.make: run must be a dict of settings, got"),
        ("sft", {"grpo": {"prompts": 3}}, "grpo.prompts is of the job 'grpo', but run"),
        ("sft", {"optimizer": {"lr": 1}}, "optimizer.lr is optimizer.learning_rate"),
        ("sft_lora", {}, "data.source and model.checkpoint are placeholders of sft"),
        ("grpo", {"task": {"reward": len}}, "make: task.reward is the name of a functio"
         'n in a file: write it to a file and name it, as in "file.py:len"'),
        ("grpo", {"task": {"reward": ["a.py:f", lambda: 0]}}, 'as in "file.py:name"'),
        ("grpo", {"task": {"environment": dict}}, "environment is the name of a class"),
        ("sft", {"run": {"steps": len}}, "run.steps must be int, got <built-in funct"),
        ("absent", {}, "cannot read absent: No such file or directory"),
        ("grpo_chekpoint", {}, "or directory; did you mean grpo_checkpoint.gin?"),
        ("qwen3_8b_24g", {}, "; did you mean recipes/qwen3_8b_24g.gin?"),
    ],
)  # fmt: skip
def test_make_has_the_errors_of_load(name, sections, expected):
    with pytest.raises(ConfigError) as caught:
        train.make(name, **sections)
    assert expected in str(caught.value)


def test_make_reads_records_of_python():
    config = train.make("sft", data={"source": RECORDS, "vocab_size": 300})
    read = documents.load_documents(config.data.source)
    assert [document.text for document in read] == ["Once upon a time", "é"]
    alone = train.make("sft", data={"source": RECORDS[:1]})
    assert alone.data.source != config.data.source
    prompts = train.make(
        "grpo",
        task={"source": [{"prompt": "1+1="}], "reward": "length"},
        model={"checkpoint": "x"},
        sampling={"max_new_tokens": 2},
    )
    assert prompts.task.source.startswith("records://")
    fixed = [jobs.job_of(made).settings().fixed for made in (config, alone)]
    assert fixed[0]["data"]["source"] != fixed[1]["data"]["source"]


def test_make_reads_data_sets_of_python():
    datasets = pytest.importorskip("datasets")
    config = train.make("sft", data={"source": RECORDS[:1]})
    loaded = datasets.Dataset.from_list(RECORDS[:1])
    assert train.make("sft", data={"source": loaded}).data.source == config.data.source


def test_records_that_are_not_in_the_cache_are_named():
    source = train.make("sft", data={"source": RECORDS}).data.source
    python_records.stored(source).unlink()
    with pytest.raises(ValueError, match="missing; call jaxmem.train.make with the sa"):
        documents.load_documents(source)
    assert train.make("sft", data={"source": RECORDS}).data.source == source
    assert [p.suffix for p in (caches.directory() / "records").iterdir()] == [".jsonl"]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], "data.source has no records"),
        ([{"text": "a"}, 3], "data.source: record 1 must be a dict, got 3"),
        ([{"text": {1}}], "data.source: record 0 cannot be written as JSON: Object of"),
        ([{"text": float("nan")}], "record 0 cannot be written as JSON: Out of range"),
    ],
)
def test_make_names_records_that_cannot_be_stored(records, expected):
    with pytest.raises(RecordsError) as caught:
        train.make("sft", data={"source": records})
    assert expected in str(caught.value)
    with pytest.raises(ConfigError, match="data.source must be str or tuple, got {}"):
        train.make("sft", data={"source": {}})


def test_old_name_of_a_class_warns():
    from jaxmem.train.jobs import config

    with pytest.warns(DeprecationWarning, match="import jaxmem.train.SftJobConfig"):
        assert config.Config is train.SftJobConfig
