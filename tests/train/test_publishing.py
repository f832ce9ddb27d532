"""Cards beside exports, and pushes of runs to the Hub."""

import pathlib

import pytest

from jaxmem.commands import cli
from tests.helpers import hub as stand_in, texts

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")

GIN = """
model.checkpoint = "owner/llama"
model.lora_rank = 1
data.source = "{source}"
data.sequence_length = 16
data.batch_size = 2
data.held_out = 0.2
eval.every = 1
optimizer.warmup_steps = 0
run.steps = 2
run.compare_heads = False
run.out_dir = "run"
run.push = "me/tuned"
"""
CARD = """\
---
base_model: owner/llama
library_name: peft
pipeline_tag: text-generation
tags:
- jaxmem
- sft
- lora
---

# tuned

Saved by [jaxmem](https://github.com/jaxmem/jaxmem) """


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A Hub with a model, a token that may write, and run.gin."""
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "text.txt"
    pathlib.Path("run.gin").write_text(GIN.format(source=source))
    source.write_text("".join(f"hello {i}\n\n" for i in range(20)))
    with stand_in.serve() as server:
        stand_in.use(server, monkeypatch, tmp_path / "home")
        monkeypatch.setenv("HF_TOKEN", stand_in.TOKEN)
        server.add("owner/llama", texts.checkpoint("llama", tmp_path))
        yield server


def command(*words):
    return cli.main(list(words))


@pytest.mark.full
def test_run_pushes_its_adapter_with_a_card(server, capfd, tmp_path):
    assert command("train", "run.gin") == 0
    assert f"pushed to {server.url}/me/tuned" in capfd.readouterr().out
    pushed = server.files("me/tuned")
    assert pushed == {
        path.name: path.read_bytes() for path in pathlib.Path("run/adapter").iterdir()
    }
    card = pushed["README.md"].decode()
    assert card.startswith(CARD)
    sha = server.repositories["models", "owner/llama"].sha()
    page = f"https://huggingface.co/owner/llama/tree/{sha}"
    for line in (
        f"| base model | [owner/llama]({page}), {sha[:12]} |",
        "| trained | LoRA adapters of rank 1 |", "| job | `sft` |", "| steps | 2 |",
        "| data | `text.txt` |", "data.sequence_length = 16",
        'AutoPeftModelForCausalLM.from_pretrained("me/tuned")',
        'jaxmem generate me/tuned "Once upon a time"',
    ):  # fmt: skip
        assert line in card, line
    assert (
        "model.layers" not in card
        and "| held out loss | " in card
        and str(tmp_path) not in card
    )
    # A card of ours is replaced when the run goes on; one that was changed is not.
    assert command("train", "run.gin", "run.steps=3") == 0
    assert "| steps | 3 |" in pathlib.Path("run/adapter/README.md").read_text()
    pathlib.Path("run/adapter/README.md").write_text("mine")
    assert command("train", "run.gin", "run.steps=4") == 2
    assert "adapter/README.md was not written by a run" in capfd.readouterr().err


@pytest.mark.full
def test_failed_push_leaves_the_run(server, capfd):
    server.add("me/tuned", {"config.json": "{}"})  # another model
    assert command("train", "run.gin") == 0
    out = " ".join(capfd.readouterr().out.split())
    assert "run.push: me/tuned contains files of another model on the Hub" in out
    assert "to try again, run: jaxmem export run --push me/tuned" in out
    assert pathlib.Path("run/summary.json").exists()
    del server.repositories["models", "me/tuned"]
    assert command("train", "run.gin") == 0  # a complete run uploads again
    assert "adapter_config.json" in server.files("me/tuned")
    del server.repositories["models", "me/tuned"]
    assert command("export", "run", "--push", "me/tuned", "--private") == 0
    assert server.repositories["models", "me/tuned"].private
    assert server.files("me/tuned")["README.md"].decode().startswith(CARD)
    assert not [*pathlib.Path().glob(".jaxmem-export-*")]
    # The model of the Hub is a model.
    assert command("export", "me/tuned", "--merge", "--out", "merged") == 0
    card = pathlib.Path("merged/README.md").read_text()
    assert "library_name: transformers" in card and "[owner/llama](" in card
    assert 'AutoModelForCausalLM.from_pretrained("merged")' in card


def test_run_that_cannot_push_does_not_start(server, monkeypatch, capfd):
    monkeypatch.delenv("HF_TOKEN")
    assert command("train", "run.gin") == 2
    said = capfd.readouterr().err
    assert "run.push: me/tuned: uploading needs a token: log in with `hf auth" in said
    assert not pathlib.Path("run").exists()


def test_export_needs_somewhere_to_go(server, capfd):
    for words in ((), ("--out", "new", "--private")):
        assert command("export", "llama", *words) == 2
        assert (
            "export needs --out or --push; --private needs --push"
        ) in capfd.readouterr().err


def test_failed_push_of_an_export_tells_how_to_retry(server, capfd):
    server.down = True
    assert command("export", "llama", "--out", "new", "--push", "me/copy") == 2
    said = capfd.readouterr().err
    assert said.rstrip().endswith(
        "to try again, run: jaxmem export llama --push me/copy"
    )
    card = pathlib.Path("new/README.md").read_text()
    assert "| base model | `llama`, a directory |" in card and "base_model:" not in card
