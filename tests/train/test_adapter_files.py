"""Adapters that are saved whole: with tokenizer and template, and their base."""

import json
import pathlib
import shutil

import pytest
import tokenizers

from jaxmem import checkpoints
from jaxmem.checkpoints import CheckpointError
from jaxmem.commands import cli
from jaxmem.train import saved
from tests.helpers import texts
from tests.helpers.runs import train, write

pytestmark = pytest.mark.usefixtures(
    "quick_compilation", "no_picture", "programs_of_module"
)
TEMPLATE = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
OTHER = "{% for m in messages %}a{{ m.content }}</s>{% endfor %}"
GIN = """
data.source = "chat.jsonl"
data.sequence_length = 16
data.batch_size = 2
data.held_out = 0.25
data.chat_template = "other.jinja"
head.chunk = 8
model.lora_rank = 2
eval.every = 1
eval.keep_best = True
run.steps = 1
run.checkpoint_every = 1
run.compare_heads = False
run.out_dir = "run"
"""


def conversation(text):
    return [{"role": role, "content": text} for role in ("user", "assistant")]


@pytest.fixture
def directory(tmp_path):
    """A checkpoint, qwen3, and an adapter of it that has another chat template."""
    model = texts.checkpoint("qwen3", tmp_path)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "other.jinja").write_text(OTHER)
    decoder = checkpoints.load(model, adapter=model / "adapter")
    options = dict(base=str(model), chat_template=tmp_path / "other.jinja")
    checkpoints.save_adapter(tmp_path / "adapter", decoder, **options)
    return tmp_path


def described(adapter):
    return json.loads((adapter / "adapter_config.json").read_text())


def exported(*arguments):
    assert cli.main(["export", *map(str, arguments)]) == 0


def check_files(adapter, model):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (adapter / name).read_text() == (model / name).read_text()
    assert (adapter / "chat_template.jinja").read_text() == OTHER
    assert described(adapter)["base_model_name_or_path"] == str(model)
    with saved.opened(adapter) as source:
        assert source.directory == model
        assert source.chat_template == str(adapter / "chat_template.jinja")


@pytest.mark.full
def test_run_leaves_adapters_with_text(directory, tmp_path, monkeypatch):
    monkeypatch.chdir(directory)
    write("chat.jsonl", [{"messages": conversation(x)} for x in "abcdefghijkl"])
    pathlib.Path("sft.gin").write_text(GIN)
    train("sft.gin", "model.checkpoint=qwen3")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    for name in ("adapter", "best/adapter"):
        check_files(directory / "run" / name, directory / "qwen3")
    adapter = str(directory / "run" / "adapter")
    assert cli.main(["generate", adapter, "ab", "--max-new-tokens", "2"]) == 0


def test_save_adapter_copies_text(directory):
    check_files(directory / "adapter", directory / "qwen3")


def test_export_names_another_base(directory, tmp_path, capsys):
    adapter = directory / "adapter"
    exported(adapter, "--out", tmp_path / "hub", "--base", "Qwen/Qwen3-0.6B@abc")
    assert "an adapter of Qwen/Qwen3-0.6B" in capsys.readouterr().out
    named = described(tmp_path / "hub")
    assert named["base_model_name_or_path"] == "Qwen/Qwen3-0.6B"
    assert named["revision"] == "abc"
    assert (tmp_path / "hub" / "chat_template.jinja").read_text() == OTHER
    # What is recorded stays, although the base is read from elsewhere.
    kept = pathlib.Path(shutil.copytree(adapter, tmp_path / "kept"))
    exported(kept, "--out", tmp_path / "local")
    base = described(tmp_path / "local")["base_model_name_or_path"]
    assert base == str(directory / "qwen3")
    model = pathlib.Path(shutil.copytree(directory / "qwen3", tmp_path / "moved"))
    exported(adapter, "--out", tmp_path / "again", "--base", model)
    assert described(tmp_path / "again")["base_model_name_or_path"] == str(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--base", "nowhere"), "--base=nowhere must be the directory of a checkpoint"),
        (("--base", "A/B", "--merge"), "--base=A/B is for an exported adapter"),
    ],
)
def test_export_refuses_a_base(options, message, directory, tmp_path, capsys):
    adapter = directory / "adapter"
    assert cli.main(["export", str(adapter), "--out", str(tmp_path / "x"), *options])
    assert message in capsys.readouterr().err


def test_other_tokens_beside_an_adapter_are_refused(directory, tmp_path):
    copied = shutil.copytree(directory / "adapter", tmp_path / "copied")
    path = pathlib.Path(copied) / "tokenizer.json"
    changed = json.loads(path.read_text())
    path.write_text(json.dumps(changed, indent=3))  # the tokens are the same
    with saved.opened(copied):
        pass
    changed = tokenizers.Tokenizer.from_file(str(path))
    more = json.loads(changed.to_str())
    vocabulary = more["model"]["vocab"]
    vocabulary["A"] = vocabulary.pop("a")
    path.write_text(json.dumps(more))
    with (
        pytest.raises(
            CheckpointError, match="token 'A' has the id 3, and None in .*qw"
        ),
        saved.opened(copied),
    ):
        pass


def test_adapter_of_a_name_is_saved_alone(tmp_path):
    decoder = checkpoints.load(
        texts.TINY / "qwen3", adapter=texts.TINY / "qwen3" / "adapter"
    )
    checkpoints.save_adapter(tmp_path / "out", decoder, base="OWNER/NAME")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors",
    }  # fmt: skip
