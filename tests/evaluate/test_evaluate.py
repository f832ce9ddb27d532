"""The harness's requests against its own transformers model; tasks of local files."""

import functools
import json
import pathlib
import shutil

import numpy as np
import pytest
import tokenizers

from jaxmem import generate
from jaxmem.commands import cli

pytest.importorskip("lm_eval", reason="lm-eval comes with the extra eval")

from jaxmem.evaluate import command, model as evaluate_model  # noqa: E402
from jaxmem.evaluate.model import HarnessModel  # noqa: E402
from jaxmem.score import journal  # noqa: E402
from jaxmem.train.output import charts  # noqa: E402
from jaxmem.train.state.ownership import RunDirectory  # noqa: E402
from tests.evaluate import make_expected
from tests.helpers.cases import full

pytestmark = pytest.mark.usefixtures("quick_compilation")

EXPECTED = json.loads(
    (pathlib.Path(make_expected.__file__).parent / "expected.json").read_text()
)
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }},{{ m.content }}.{% endfor %}"
    "{% if add_generation_prompt %}a,{% endif %}"
)
CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}} "
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
WORDS = """
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{written}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 4, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module", autouse=True)
def index_of_our_tasks():
    """The harness reads the files of all its own tasks, thousands, for each command."""
    with pytest.MonkeyPatch.context() as patched:
        ours = functools.partial(command.TaskManager, include_defaults=False)
        patched.setattr(command, "TaskManager", functools.cache(ours))
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made = make_expected.checkpoint(tmp_path_factory.mktemp("model"))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def model(directory):
    return generate.load(directory, dtype="float32")


@pytest.fixture(scope="module")
def harness(model):
    return HarnessModel(model, "tiny", 256, batch_size=2)


@pytest.mark.full
def test_continuations_score_as_in_transformers(harness):
    for (logprob, greedy), (wanted, is_greedy) in zip(
        make_expected.pairs_of(harness), EXPECTED["pairs"], strict=True
    ):
        assert logprob == pytest.approx(wanted, rel=1e-5) and greedy == is_greedy


def test_long_texts_score_as_in_transformers(harness):
    texts = make_expected.texts_of(harness)
    np.testing.assert_allclose(texts, EXPECTED["texts"], rtol=1e-5)


@pytest.mark.parametrize("number", [full(0), full(1), 2])  # each compiles a sampler
def test_completions_are_those_of_transformers(harness, number):
    one = slice(number, number + 1)
    made = make_expected.completions_of(harness, make_expected.PROMPTS[one])
    assert made == EXPECTED["completions"][one]


def test_greedy_decoding_scores_as_greedy(model):
    harness = HarnessModel(model, "tiny")
    (written,) = harness.generate_until(
        make_expected.instances(
            "generate_until", [("one", {"until": [], "max_gen_toks": 5})]
        )
    )
    pairs = [("one", written), ("one", written[:-1] + ",")]
    scores = harness.loglikelihood(make_expected.instances("loglikelihood", pairs))
    assert [greedy for _, greedy in scores] == [True, written.endswith(",")]


def test_rendered_conversation_starts_once(model):
    harness = HarnessModel(model, "tiny")
    text = harness.apply_chat_template([{"role": "user", "content": "noon"}])
    assert text == "u,noon.a,"
    plain, started = (
        harness._encode_with_start(text),
        harness._encode_with_start(f"<s>{text}"),
    )
    assert plain == started and plain.count(1) == 1


def merging(model, *, metaspace=False):
    """The model with a tokenizer that has one token for "ts"."""
    plain = model.vocabulary.tokenizer
    ids = plain.get_vocab()
    ids = {word: i for word, i in ids.items() if word not in ("7", "6")}
    ids |= {"ts": plain.token_to_id("7") or 39, "\u2581": plain.token_to_id("6") or 38}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [("t", "s")]))
    made.decoder = tokenizers.decoders.Fuse()
    if metaspace:
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        made.decoder = tokenizers.decoders.Metaspace()
    return model._replace(vocabulary=model.vocabulary._replace(tokenizer=made))


def scores(model, *pairs):
    return HarnessModel(model, "tiny", 256).loglikelihood(
        make_expected.instances("loglikelihood", pairs)
    )


def test_token_across_context_and_continuation(model):
    expected = scores(model, ("a cat", "s"), ("a cat", "sat"), ("a", "b"))
    with pytest.warns(
        UserWarning, match="2 of 3 continuations were encoded separately"
    ):
        made = scores(merging(model), ("a cat", "s"), ("a cat", "sat"), ("a", "b"))
    assert all(logprob < 0 for logprob, _ in made)
    np.testing.assert_allclose(made, expected, rtol=1e-6)
    joint = scores(merging(model), ("a ca", "ts"), ("a", " cats"))  # no token of both
    assert len(joint) == 2


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (
            ("a cat", "s"),
            "context 'a cat', continuation 's': a token of the joint t",
        ),
        (("a cat", ""), "context 'a cat', continuation '': the continuation has no to"),
        (("a cat ", ""), "context 'a cat ', continuation '': the continuation has no"),
        (("", ""), "context '', continuation '': the continuation has no token"),
    ],
)
def test_continuation_without_tokens_is_refused(model, pair, message):
    with pytest.raises(ValueError, match=message):
        scores(merging(model, metaspace=True), pair)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, model):
    """Two tasks whose answers the model's own likelihoods and completions decide."""
    folder = tmp_path_factory.mktemp("tasks")
    harness = HarnessModel(model, "tiny")
    questions, choices = ("one two", "a cat", "some words"), ["left", "right"]
    # All at once, as the command has them, by the same programs.
    pairs = [(f"{question} ", choice) for question in questions for choice in choices]
    scores = harness.loglikelihood(make_expected.instances("loglikelihood", pairs))
    best = np.argmax(np.reshape([logprob for logprob, _ in scores], (3, 2)), 1)
    options = {"until": ["."], "max_gen_toks": 4}
    requests = [(question, options) for question in questions]
    written = harness.generate_until(
        make_expected.instances("generate_until", requests)
    )
    rows = [
        dict(question=asked, choices=choices, answer=int(right), written=text)
        for asked, right, text in zip(questions, best, written, strict=True)
    ]
    rows[0]["answer"] = 1 - rows[0]["answer"]  # one wrong answer of each kind
    rows[1]["written"] = "no"
    data = folder / "rows.json"
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, text in (("choices", CHOICES), ("words", WORDS)):
        (folder / f"{name}.yaml").write_text(text.format(data=data))
    return folder


def test_tasks_of_local_files_are_evaluated(directory, tasks, tmp_path, capsys):
    """The results are those of a run, in its directory and its report."""
    run = tmp_path / "run"
    shutil.copytree(directory, run / "model")
    (run / "settings.gin").write_text("")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    RunDirectory(run, "run.out_dir").mark()
    out = run / "eval.json"
    out.write_text('{"results": {}, "options": {}}')  # of the last time
    status = cli.main(
        ["eval", str(run), "--tasks", "choices,words", "--include", str(tasks),
         "--dtype", "float32"]
    )  # fmt: skip
    assert status == 0 and "exact_match" in capsys.readouterr().out
    results = json.loads(out.read_text())["results"]
    assert results["choices"]["acc,none"] == pytest.approx(2 / 3)
    assert results["words"]["exact_match,none"] == pytest.approx(2 / 3)
    page = (run / "report.html").read_text()
    assert (
        "<td>choices</td><td>acc</td>" in page and f">{charts.number(2 / 3)}<" in page
    )
    assert "sample_len" not in page


@pytest.mark.full
def test_eval_codes_the_base(directory, tasks, tmp_path):
    out = tmp_path / "eval.json"
    status = cli.main(
        ["eval", str(directory), "--tasks", "words", "--include", str(tasks),
         "--dtype", "float32", "--base", "int8", "--out", str(out)]
    )  # fmt: skip
    made = json.loads(out.read_text())
    assert status == 0 and made["options"]["base"] == "int8"
    assert made["results"]["words"]["exact_match,none"] == pytest.approx(2 / 3)


@pytest.fixture
def evaluated(directory, tasks, tmp_path, monkeypatch):
    """Evaluates in groups of two requests; returns the results of a file."""
    monkeypatch.setattr(evaluate_model, "_WINDOWS_AT_ONCE", 2)
    tasks = shutil.copytree(tasks, tmp_path / "tasks")

    def evaluated(out, *more):
        out = tmp_path / out
        status = cli.main(
            ["eval", str(directory), "--include", str(tasks), "--dtype", "float32",
             "--tasks", "choices,words", "--batch-size", "2", "--out", str(out), *more]
        )  # fmt: skip
        if status:
            return None
        assert not out.with_name(f"{out.name}.unfinished").exists()
        return json.loads(out.read_text())["results"]

    evaluated.tasks = tasks
    return evaluated


def killed_after(groups, evaluated, monkeypatch):
    """A command that dies in the middle of a write, after so many that were whole."""
    count, append = 0, journal.Journal.append

    def half(self, made):
        nonlocal count
        if count == groups:
            with open(self.path, "ab") as file:
                file.write(b'{"inputs": "half')
            raise KeyboardInterrupt
        count += 1
        append(self, made)

    with monkeypatch.context() as patched:
        patched.setattr(journal.Journal, "append", half)
        assert evaluated("x.json") is None


@pytest.mark.parametrize("groups", [full(0), full(2), 4])
def test_killed_eval_repeats_and_loses_nothing(groups, evaluated, monkeypatch, capsys):
    whole = evaluated("whole.json")
    killed_after(groups, evaluated, monkeypatch)
    assert "interrupted" in capsys.readouterr().err
    counts, append = [], journal.Journal.append
    monkeypatch.setattr(
        journal.Journal, "append", lambda self, x: counts.append(1) or append(self, x)
    )
    assert evaluated("x.json") == whole
    assert len(counts) == 5 - groups  # three pairs of texts, and two of prompts


def test_unfinished_eval_of_other_requests_is_refused(evaluated, monkeypatch, capsys):
    killed_after(1, evaluated, monkeypatch)
    assert evaluated("x.json", "--limit", "2") is None
    said = capsys.readouterr().err
    assert "results of other options: --limit left out (now 2); give the" in said
    other = evaluated.tasks / "other.json"
    text = (evaluated.tasks / "rows.json").read_text()
    for word in ("one", "cat", "some"):
        text = text.replace(word, "other")
    other.write_text(text)
    (evaluated.tasks / "choices.yaml").write_text(CHOICES.format(data=other))
    assert evaluated("x.json") is None
    assert "x.json.unfinished contains answers to other req" in capsys.readouterr().err


def test_eval_sets_variables_of_the_template(directory, tasks, tmp_path, monkeypatch):
    directory = shutil.copytree(directory, tmp_path / "model")
    template = "{% if thinks is defined and not thinks %}[]{% endif %}" + TEMPLATE
    (directory / "chat_template.jinja").write_text(template)
    evaluate, texts = command.lm_eval.simple_evaluate, []

    def spied(model, **options):
        turns = [{"role": "user", "content": "noon"}]
        texts.append(model.apply_chat_template(turns))
        return evaluate(model, **options)

    monkeypatch.setattr(command.lm_eval, "simple_evaluate", spied)
    given = ["eval", str(directory), "--include", str(tasks), "--tasks", "choices"]
    given += ["--dtype", "float32", "--chat"]
    for name, more in (
        ("plain", []),
        ("made", ['--chat-template-kwargs={"thinks":0}']),
    ):
        out = tmp_path / f"{name}.json"
        assert cli.main([*given, "--out", str(out), *more]) == 0
    assert texts[1] == "[]" + texts[0]
    assert json.loads(out.read_text())["options"]["chat_template_kwargs"] == {
        "thinks": 0
    }


def test_eval_refuses_bad_arguments(directory, tasks, tmp_path, capsys):
    given = ["eval", str(directory), "--include", str(tasks)]
    out = ["--out", str(tmp_path / "x.json")]
    assert cli.main([*given, "--tasks", "absent", *out]) == 2
    assert "no task absent" in capsys.readouterr().err
    assert cli.main([*given, "--tasks", "choices"]) == 2
    assert "is not a run" in capsys.readouterr().err
    for more, said in (
        (["--out", str(tmp_path / "no" / "x.json")], "does not exist"),
        (
            [*out, "--include", "nowhere"],
            "--include nowhere: the folder does not exist",
        ),
        ([*out, "--shots", "-1"], "--shots must be at least 0, got -1"),
        (
            [*out, '--chat-template-kwargs={"a": 1}'],
            "--chat-template-kwargs needs --chat",
        ),
    ):
        assert cli.main([*given, "--tasks", "choices", *more]) == 2
        assert said in capsys.readouterr().err


def test_files_of_others_are_not_replaced(directory, tasks, tmp_path, capsys):
    """Neither those of --out, nor in a directory that only looks like a run."""
    given = ["eval", str(directory), "--include", str(tasks), "--tasks", "choices"]
    mine = tmp_path / "x.json"
    mine.write_text("mine")
    assert cli.main([*given, "--out", str(mine)]) == 2
    assert f"--out {mine} exists" in capsys.readouterr().err
    run = tmp_path / "run"
    shutil.copytree(directory, run / "model")
    given[1] = str(run)
    for name in ("metrics.jsonl", "report.html", "eval.json"):
        (run / name).write_text("mine")
    assert cli.main(given) == 2 and "is not a run" in capsys.readouterr().err
    RunDirectory(run, "run.out_dir").mark()
    assert cli.main(given) == 2
    assert "eval.json was not written by jaxmem eval" in capsys.readouterr().err
    for name in ("metrics.jsonl", "report.html", "eval.json"):
        assert (run / name).read_text() == "mine"


def test_eval_of_run_imports_no_code_it_names(directory, tasks, tmp_path, capsys):
    shutil.copy(directory / "tokenizer.json", tmp_path)
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    code = "import pathlib\npathlib.Path(__file__ + '.ran').touch()\n"
    (tmp_path / "evil.py").write_text(code)
    named = f"{tmp_path}/evil.py:f"
    (tmp_path / "operative.gin").write_text(f'model.factory = "{named}"')
    given = ["eval", str(tmp_path), "--include", str(tasks), "--tasks", "choices"]
    given += ["--out", str(tmp_path / "x.json")]
    assert cli.main(given) == 2
    assert f"would run {tmp_path}/evil.py: name your own" in capsys.readouterr().err
    assert not (tmp_path / "evil.py.ran").exists()
    assert cli.main([*given, "--trust-code"]) == 2
    assert (tmp_path / "evil.py.ran").exists()


def test_options_that_jaxmem_lacks_are_refused(model):
    harness = HarnessModel(model, "tiny")
    request = ("one", {"until": [], "repetition_penalty": 1.2})
    with pytest.raises(ValueError, match="repetition_penalty=1.2"):
        harness.generate_until(make_expected.instances("generate_until", [request]))
    pair = ("x", "a" * 70)
    with pytest.raises(ValueError, match="70 tokens is longer than the 64"):
        harness.loglikelihood(make_expected.instances("loglikelihood", [pair]))
