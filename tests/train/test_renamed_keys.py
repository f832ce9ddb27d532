"""Keys of the model before version 0.3, when its architecture had no groups."""

import json
import re
from pathlib import Path

import pytest

from jaxmem.train import configuration, jobs
from jaxmem.train.jobs import dpo
from jaxmem.train.renamed_keys import RENAMED
from jaxmem.train.state import resuming

CONFIGS = Path(__file__).parents[2] / "configs"
OLD = {renamed.key: old for old, renamed in RENAMED.items()}
IN_GROUPS = [
    str(path.relative_to(CONFIGS))
    for path in sorted(CONFIGS.rglob("*.gin"))
    if re.search(r"^model\.\w+\.\w+ =", path.read_text(), re.MULTILINE)
]
FROM_USERS = "data.source", "task.source", "model.checkpoint"  # what they have
# Recorded by a run of version 0.2: its operative.gin, and its checkpoint's settings.
SAVED = Path(__file__).parent / "saved"


def old_key(line):
    return OLD[line[0]]


@pytest.mark.parametrize("name", IN_GROUPS)
def test_shipped_file_with_old_keys_is_the_same_model(name, tmp_path, capsys):
    text = (CONFIGS / name).read_text()
    old = re.sub(r"^model\.\w+\.\w+(?= =)", old_key, text, flags=re.MULTILINE)
    assert old != text
    (tmp_path / "old.gin").write_text(old)
    expected = configuration.load(CONFIGS / name, optional=FROM_USERS)
    capsys.readouterr()
    assert configuration.load(tmp_path / "old.gin", optional=FROM_USERS) == expected
    assert capsys.readouterr().err.startswith(f"jaxmem: {tmp_path / 'old.gin'}: model.")


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("qk_norm_last", "qk_norm.after_rope", True),
        ("norm", "norm.kind", "layer"),  # the old key is the name of a group now
        ("qk_norm", "qk_norm.enabled", True),
        ("parallel", "residual.parallel", "shared"),
    ],
)
def test_old_key_of_the_model_is_read_everywhere(old, new, value, tmp_path, capsys):
    (tmp_path / "a.gin").write_text(f"model.{old} = {value!r}")
    (tmp_path / "b.gin").write_text("")
    group, _, name = new.partition(".")
    expected = configuration.make("sft", model={group: {name: value}})
    assert expected != configuration.make("sft")
    assert capsys.readouterr().err == ""
    for read in (
        lambda: configuration.load(tmp_path / "a.gin")[0],
        lambda: configuration.load(tmp_path / "b.gin", [f"model.{old}={value!r}"])[0],
        lambda: configuration.make("sft", model={old: value}),
    ):
        assert read() == expected
        said = f"model.{old} is now model.{new}; old names are read up to version 0.3\n"
        assert capsys.readouterr().err.endswith(said)


def test_old_and_new_key_in_one_call_are_refused():
    expected = "model.rope_theta and model.rope.theta are the same setting"
    with pytest.raises(configuration.ConfigError, match=expected):
        configuration.make("sft", model={"rope_theta": 9.0, "rope": {"theta": 8.0}})


def test_settings_of_a_saved_run_are_those_of_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("the head of a model " * 20)
    config, text = configuration.load(SAVED / "flat_keys.gin")
    model = config.model
    assert (model.rope.theta, model.norm.eps, model.self_attn.window) == (500, 1e-5, 5)
    assert (model.self_attn.softcap, model.logits.softcap) == (30, 20)
    assert model.qk_norm.enabled and model.qk_norm.after_rope
    assert "model.rope.theta = 500.0" in text and "model.rope_theta" not in text
    saved = json.loads((SAVED / "flat_keys.json").read_text())
    settings = jobs.job_of(config).settings()
    assert resuming.changes(saved, settings, tmp_path, 4, 4) == []
    sampled = jobs.job_of(config.replaced({"head.gradient": ("sample", 4)})).settings()
    assert resuming.changes(saved, sampled, tmp_path, 4, 5) == []  # not in old runs
    current = json.loads(
        json.dumps({**settings.fixed, "changeable": settings.changeable})
    )
    (line,) = resuming.changes(current, sampled, tmp_path, 4, 5)
    assert line == "head.gradient was None, is ('sample', 4)"
    other = jobs.job_of(config.replaced({"model.rope.theta": 600.0})).settings()
    with pytest.raises(ValueError, match="model.rope.theta was 500.0, is 600.0"):
        resuming.changes(saved, other, tmp_path, 4, 4)


def test_reference_of_older_names_is_that_of_the_model():
    saved = json.dumps(["pairs", {"rope_theta": 5.0, "layers": 2}, 0, "means"])
    current = ["pairs", {"layers": 2, "rope.theta": 5.0}, 0, "means"]
    assert dpo._is_same(saved, json.dumps(current))
    current[1]["rope.theta"] = 6.0
    assert not dpo._is_same(saved, json.dumps(current))
