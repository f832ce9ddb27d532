"""The lines of docs/data.md are copied into a file and trained on."""

import io
import pathlib
import re

import pytest
from rich.console import Console

from jaxmem.commands import cli
from jaxmem.train import configuration, jobs
from tests.helpers import texts

pytestmark = pytest.mark.usefixtures(
    "quick_compilation", "no_picture", "programs_of_module"
)
PAGE = pathlib.Path(__file__).parents[3] / "docs" / "data.md"
ROW = re.compile(r"^\| ([^|]+) \| `({.*})` \| ([^|]+) \|$", re.MULTILINE)
FORMS = {form: line for form, line, _ in ROW.findall(PAGE.read_text("utf-8"))}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}<s>{{ m.role[0] }} {{ m.reasoning_content or '' }}"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>a {% endif %}"
)
COMMON = """
model.checkpoint = "qwen3"
head.chunk = 32
optimizer.warmup_steps = 0
run.steps = 1
run.compare_heads = False
"""
DATA = 'data.source = "data.jsonl"\ndata.sequence_length = 128\ndata.batch_size = 1\n'
GIN = {
    "sft": DATA,
    "dpo": DATA,
    "grpo": 'task.source = "data.jsonl"\ntask.max_prompt_tokens = 8\n'
    "sampling.max_new_tokens = 2\ngrpo.prompts = 1\ngrpo.group_size = 2\n"
    "grpo.minibatches = 1\ngrpo.max_tokens_train = 16\ngrpo.max_tokens_forward = 16\n"
    "grpo.row_lengths = (16,)\n",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forms")
    model = texts.checkpoint("qwen3", folder)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    for job, lines in GIN.items():
        text = f'{COMMON}{lines}run.job = "{job}"\n'
        (folder / f"{job}.gin").write_text(text)
    return folder


def job_of(form):
    return next((job for job in GIN if f"({job}" in form), "sft")


def test_page_has_forms_for_each_job():
    assert len(FORMS) >= 10
    assert {job_of(form) for form in FORMS} == GIN.keys()


def job_of_line(form, directory, monkeypatch):
    monkeypatch.chdir(directory)
    (directory / "data.jsonl").write_text(FORMS[form] + "\n")
    return job_of(form)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_line_of_the_page_is_trained_on(form, directory, monkeypatch):
    job, out_dir = job_of_line(form, directory, monkeypatch), re.sub(r"\W+", "_", form)
    config, text = configuration.load(f"{job}.gin", [f"run.out_dir={out_dir}"])
    console = Console(file=io.StringIO(), width=200)
    (step,) = jobs.train(config, text, console).history
    assert step.tokens > 0
    said = console.file.getvalue()
    named = re.split(r" with| \(| of conv", form)[0]  # as the reader names it
    assert f"read as {named}" in said or "in two columns" in form


@pytest.mark.parametrize("form", FORMS)
def test_show_prints_read_rendered_and_counted(form, directory, monkeypatch, capsys):
    job = job_of_line(form, directory, monkeypatch)
    assert cli.main(["data", f"{job}.gin", "--show", "1"]) == 0
    shown = capsys.readouterr().out
    assert "data.jsonl:1" in shown and "read as " in shown
    if job != "grpo":
        assert "the loss counts" in shown and "⟦" in shown
