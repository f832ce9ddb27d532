"""Runs of models of the Hub: directories while they train, names in their records."""

import json
import pathlib

import pytest

from jaxmem.base import hub
from jaxmem.checkpoints import base_record
from jaxmem.commands import cli
from jaxmem.planning import command as planning
from jaxmem.train import agreement, configuration, model_names, saved
from tests.helpers import hub as stand_in, texts

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")

GIN = """
model.checkpoint = "owner/llama"
model.lora_rank = 1
data.source = "text.txt"
data.sequence_length = 16
data.batch_size = 2
optimizer.warmup_steps = 0
run.steps = 1
run.compare_heads = False
run.out_dir = "run"
"""


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A Hub with one commit of owner/llama, and run.gin in the current directory."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("run.gin").write_text(GIN)
    pathlib.Path("text.txt").write_text("hello\n\n" * 20)
    texts.checkpoint("llama", tmp_path)
    with stand_in.serve() as server:
        stand_in.use(server, monkeypatch, tmp_path / "home")
        server.add("owner/llama", tmp_path / "llama")
        yield server


def name_in_hub(server, index=-1):
    sha = server.repositories["models", "owner/llama"].sha(index)
    return f"hf://owner/llama@{sha}"


def load(*overrides):
    return configuration.load("run.gin", overrides)[0]


def test_with_directories_leaves_the_rest(server):
    config = load()
    local = model_names.with_directories(config)
    assert pathlib.Path(local.model.checkpoint, "model.safetensors").exists()
    assert model_names.recorded(local) == load(
        f"model.checkpoint={name_in_hub(server)}"
    )
    assert model_names.with_directories(local) == local
    plain = load("model.checkpoint=llama")
    assert model_names.with_directories(plain) == plain == model_names.recorded(plain)


def test_processes_compare_commits_and_not_caches(server):
    local = model_names.with_directories(load())
    facts = agreement.facts(local)
    assert facts["model.checkpoint"] == repr(name_in_hub(server))
    assert not [name for name in facts if "content of model" in name]


@pytest.mark.parametrize(
    "line",
    ["'owner/llama'", "\\\n    'hf://owner/llama'", "%NAME"],
)
def test_recorded_text_has_the_commit(server, line):
    local = model_names.with_directories(load())
    text = f"NAME = 'owner/llama'\nmodel.checkpoint = {line}\nmodel.ff = 2\n"
    assert model_names.recorded_text(text, local) == (
        f"NAME = 'owner/llama'\nmodel.checkpoint = {name_in_hub(server)!r}\n"
        "model.ff = 2\n"
    )


def test_of_run_keeps_the_commit_of_its_run(server):
    old = name_in_hub(server)
    pathlib.Path("run").mkdir()
    pathlib.Path("run/operative.gin").write_text(f"model.checkpoint = {old!r}\n")
    assert model_names.of_run(load()).model.checkpoint == old
    for other in ("owner/llama@main", "owner/other", "llama"):
        config = load(f"model.checkpoint={other}")
        assert model_names.of_run(config) == config


def test_plan_fetches_no_weights(server):
    job = planning.load(pathlib.Path("run.gin"), ())
    copy = job.config.model.checkpoint
    assert hub.model_of(copy) is not None
    assert {p.name for p in pathlib.Path(copy).iterdir()} == {
        "config.json", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip


def test_opened_finds_models_of_the_hub(server):
    old = name_in_hub(server)
    server.add("owner/llama", {"config.json": "{}", "model.safetensors": b""})
    _, _, revision = old.rpartition("@")
    named = {"base_model_name_or_path": "owner/llama", "revision": revision}
    files = {"adapter_config.json": json.dumps(named), "adapter_model.safetensors": b""}
    server.add("owner/adapter", files)
    with saved.opened("owner/adapter") as found:
        assert hub.recorded(str(found.directory)) == old
        assert hub.model_of(found.adapter).repository == "owner/adapter"
    with saved.opened(old, "owner/adapter") as beside:
        assert beside == found


def test_adapter_of_a_copy_names_the_model_of_the_hub(server):
    local = model_names.with_directories(load())
    base = base_record.BaseName.of(local.model.checkpoint)
    assert f"hf://{base.name}@{base.revision}" == name_in_hub(server)
    assert str(base.directory()) == local.model.checkpoint


@pytest.mark.full
def test_run_of_a_model_of_the_hub_goes_on_with_its_commit(server, capfd):
    assert cli.main(["train", "run.gin"]) == 0
    assert "jaxmem: downloading hf://owner/llama@" in capfd.readouterr().err
    old = name_in_hub(server)
    operative = pathlib.Path("run/operative.gin").read_text()
    assert f"\nmodel.checkpoint = {old!r}\n" in operative
    assert (
        f"model.checkpoint = {old!r}\n" in pathlib.Path("run/settings.gin").read_text()
    )
    adapter = json.loads(pathlib.Path("run/adapter/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "owner/llama"
    assert adapter["revision"] == old.rpartition("@")[2]
    saved = json.loads(pathlib.Path("run/checkpoints/1/config/metadata").read_text())
    assert saved["model"]["checkpoint"] == old
    # The Hub has another model of that name by now.
    changed = server.files("owner/llama") | {"README.md": b"newer"}
    server.add("owner/llama", changed)
    assert cli.main(["train", "run.gin", "run.steps=2"]) == 0
    assert pathlib.Path("run/operative.gin").read_text().count(old) == 1
    said = cli.main(
        ["train", "run.gin", "run.steps=3", "model.checkpoint=owner/llama@main"]
    )
    assert said == 2
    assert f"is {name_in_hub(server)!r}" in capfd.readouterr().err
