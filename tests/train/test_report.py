"""The page of a run: its HTML by a parser, its looks and console in a browser."""

import html
import html.parser
import json
import math
import re
import shutil
import subprocess

import pytest

from jaxmem.train.metrics import PolicyMetrics, StepMetrics
from jaxmem.train.output import charts, report
from tests.helpers.cases import slow

BROWSERS = "chromium", "chromium-browser", "google-chrome", "chromium-headless-shell"
VOID = {"meta", "link", "br", "circle", "line", "polyline"}
SAMPLES = [
    {
        "prompt": "<script>alert(1)</script> & so on",
        "tokens": [" a", "\n", "<b>", "x" * 90],
        "logprobs": [-0.1, -9.0, -2.5, 0.0],
        "reward": 0.5,
    },
    {
        "prompt": "2*3=",
        "tokens": ["[2*3]", "6=", "6"],
        "logprobs": [-0.1, None, -0.1],  # an environment said the second one
        "reward": 1.0,
    },
]


def policy(step):
    values = dict.fromkeys(PolicyMetrics._fields[:22], 0.5 + 1 / step)
    values |= dict(step=step, kl=None, peak_gib=None, learning_rate=1e-5 / step)
    values |= dict(rewards={"right": 0.1 * step, "short": 1.0})
    if step % 3 == 0:
        values |= dict(held_out_reward=0.3)
    return PolicyMetrics(**values)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a GRPO run, as far as a report reads it."""
    directory = tmp_path_factory.mktemp("report") / "run <1>"
    directory.mkdir()
    lines = [json.dumps(policy(step)._asdict()) for step in range(1, 10)]
    lines.insert(4, '{"step": 4, "rew')  # cut short by a kill
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    sizes = {"temporary": 2**20, "peak": 2**22}
    memory = {
        name: {"head": sizes, "step": sizes} for name in ("fused", "materialised")
    }
    summary = {"device": "NVIDIA H200", "memory": memory}
    (directory / "summary.json").write_text(json.dumps(summary))
    samples = "".join(json.dumps(sample) + "\n" for sample in SAMPLES)
    (directory / "samples.jsonl").write_text(samples)
    (directory / "settings.gin").write_text("task.stop = '</s>'\n")
    report.write(directory)
    return directory


class Page(html.parser.HTMLParser):
    """Checks that elements nest, and keeps what a test asks for."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_page_is_whole_html_without_network(run):
    text = (run / "report.html").read_text("utf-8")
    page = Page(text)
    assert "script" not in page.tags
    links = [v for k, v in page.attributes if k in ("src", "href", "action")]
    assert links == ["data:,"] and "http" not in text and "url(" not in text
    assert page.tags.count("svg") == page.tags.count("h3") == 13
    shown = " ".join(page.texts)
    for part in (
        "run <1>", "step 9", "NVIDIA H200", "Reward", "held out", "Entropy", "Tokens c",
        "Learning rate", "Tokens per second", "Reward: right",
        "head alone without logits",
        "<script>alert(1)</script> & so on", "task.stop = '</s>'", "↵", "1 MiB",
    ):  # fmt: skip
        assert part in shown, part
    assert "KL to the" not in shown  # it was not measured
    colours = re.findall(
        r"rgba\(226,105,30,([\d.]+)\)\" title=\"ln p = -?[\d.]+\"", text
    )
    assert colours[2:] == ["0.01", "0.85", "0.35", "0.00", "0.01", "0.01"]
    assert '<span class="said">6=</span>' in text and "slanted" in shown


ABOUT = {
    "jaxmem": "0.2.0", "jax": "0.12.0", "devices": "8 x NVIDIA H200", "processes": 2,
    "mesh": {"data": 2, "fsdp": 4}, "parameters": 8_000_000, "trained": 40_000,
    "data": {"records": 50, "noun": "pairs", "tokens": 200, "per_step": None},
    "command": "jaxmem train dpo_lora.gin", "commit": "abc123 with uncommitted changes",
}  # fmt: skip
FACTS = {
    "Started": "2026-11-28 12:00:00; 3 steps took 1:02:03",
    "Command": "jaxmem train dpo_lora.gin",
    "Git commit": "abc123 with uncommitted changes",
    "Devices": "8 x NVIDIA H200 in 2 processes, mesh data=2, fsdp=4",
    "Parameters": "8,000,000, of which 40,000 (0.50%) are trained",
    "Data": "50 pairs, 1.5 epochs, 300 tokens learned from",
    "Versions": "jaxmem 0.2.0, jax 0.12.0",
}


def facts_of(directory, about):
    """Texts of the page's table of facts, by name."""
    steps = [StepMetrics(i, 1.0, 100, 10.0 * i, 1.0, 1e-3, 1241.0) for i in (1, 2, 3)]
    lines = [json.dumps(step._asdict()) + "\n" for step in steps]
    (directory / "metrics.jsonl").write_text("".join(lines))
    (directory / "started.txt").write_text("2026-11-28 12:00:00\n")
    (directory / "about.json").write_text(about)
    report.write(directory)
    text = (directory / "report.html").read_text()
    rows = re.findall("<tr><th>([^<]*)</th><td>([^<]*)</td></tr>", text)
    assert "median; last 30" in text
    return dict(rows)


def test_page_has_facts_of_the_run(tmp_path):
    assert facts_of(tmp_path, json.dumps(ABOUT)) == FACTS
    rest = {"mesh": {}, "processes": 1, "commit": None, "trained": 8_000_000}
    prompts = {"records": 12, "noun": "prompts", "tokens": None, "per_step": 8}
    facts = facts_of(tmp_path, json.dumps({**ABOUT, **rest, "data": prompts}))
    assert "Git commit" not in facts and facts["Devices"] == "8 x NVIDIA H200"
    assert facts["Parameters"] == "8,000,000, of which all are trained"
    assert facts["Data"] == "12 prompts, 2 epochs, 300 tokens learned from"


@pytest.mark.parametrize("about", ["", "[]", '{"mesh": 3, "data": []', "{}"])
def test_page_without_readable_facts_has_the_start(about, tmp_path):
    assert facts_of(tmp_path, about) == {"Started": FACTS["Started"]}


@pytest.mark.parametrize("name", ABOUT)
def test_fact_of_the_wrong_type_is_left_out(name, tmp_path):
    facts = facts_of(tmp_path, json.dumps({**ABOUT, name: {"a": [1]}}))
    assert FACTS.items() - facts.items() and "Started" in facts


def test_report_of_supervised_run(tmp_path):
    report.write(tmp_path)
    assert not (tmp_path / "report.html").exists()  # no step yet
    steps = [
        StepMetrics(i, 5.0 - i, 100, 1e5, math.nan, 1e-3, 0.1, held_out_loss=held_out)
        for i, held_out in ((1, None), (2, 4.5))
    ]
    lines = [json.dumps(step._asdict()) + "\n" for step in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    settings = "data.source = 'a.jsonl'\nmodel.checkpoint = None\nrun.job = 'sft'\n"
    (tmp_path / "operative.gin").write_text(settings)
    report.write(tmp_path)
    page = Page((tmp_path / "report.html").read_text("utf-8"))
    titles = [v for k, v in page.attributes if k == "aria-label"]
    assert titles == ["Loss", "Learning rate", "Tokens per second"]  # no NaN
    shown = " ".join(page.texts)
    assert "data.source = 'a.jsonl', run.job = 'sft' Loss, held out 4.5" in shown
    assert "4.5 best 4.5, step 2 Time of all steps 0 s 0.1 s per step (median)" in shown
    assert "Samples of the last rollout" not in page.texts
    first = lines[0]  # without a held-out loss, the loss itself comes first
    (tmp_path / "metrics.jsonl").write_text(first)
    report.write(tmp_path)
    page = Page((tmp_path / "report.html").read_text("utf-8"))
    assert "run.job = 'sft' Loss 4 from 4 Time of all steps" in " ".join(page.texts)


@pytest.mark.parametrize(
    "ys", [[0.0], [1.0, 1.0], [-3e-7, 2e-7], [1e9, -1e9, 5.0], [math.pi] * 1000]
)
def test_lines_stay_inside_their_chart(ys):
    lines = [charts.Line("a", list(enumerate(ys, 1))), charts.Line("b", [(1, ys[0])])]
    drawn = charts.chart("t", lines)
    for path in re.findall(r'points="([^"]+)"', drawn):
        for point in path.split():
            x, y = map(float, point.split(","))
            assert 45 <= x <= 352 and 7 <= y <= 168
    assert drawn.count(",") < 3000  # of a long line, fewer points


def test_single_step_is_centred_over_its_number():
    drawn = charts.chart("t", [charts.Line("", [(7, 2.0)])])
    assert re.findall(r'<text class="middle" x="([\d.]+)"[^>]*>([^<]+)<', drawn) == [
        ("199.0", "step 7")
    ]
    assert re.findall(r'cx="([\d.]+)"', drawn) == ["199.0"]
    assert re.findall(r">([\d.]+)</text>", drawn) == ["1.8", "1.9", "2", "2.1", "2.2"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (12345.6, "12,346"), (0.25, "0.25"), (2e-5, "2.0e-5"), (3e6, "3.0e6")],
)
def test_numbers_are_short(value, shown):
    assert charts.number(value) == shown


MEASURE = """<!doctype html><title>none</title><body>
<iframe width=400 height=900 srcdoc="{page}"></iframe>
<iframe width=1400 height=900 srcdoc="{page}"></iframe>
<script>onload = () => {{
  const widths = [...document.querySelectorAll("iframe")].map(frame => {{
    const page = frame.contentDocument, root = page.documentElement
    const texts = [...page.querySelectorAll("svg text")].map(
      text => text.getBoundingClientRect().height)
    const right = [...page.querySelectorAll(".card, h1")].map(
      card => card.getBoundingClientRect().right)
    return [root.clientWidth, root.scrollWidth, Math.max(...right),
            page.querySelectorAll("svg").length, Math.min(...texts)]
  }})
  document.title = JSON.stringify(widths)
}}</script>"""


def test_browser_shows_the_page_without_errors(run, tmp_path):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"needs a browser, one of {', '.join(BROWSERS)}")
    text = (run / "report.html").read_text("utf-8")
    page = tmp_path / "measure.html"
    page.write_text(MEASURE.format(page=html.escape(text)), "utf-8")
    shown = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
         "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}",
         page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in shown.stderr, shown.stderr
    title = html.unescape(re.search("<title>(.*?)</title>", shown.stdout)[1])
    for wanted, measured in zip((400, 1400), json.loads(title), strict=True):
        width, content, right, drawn, text_height = measured
        assert wanted - 20 <= width <= wanted and content <= width
        assert right <= width and drawn == 13
        assert text_height >= 8  # pixels


# -------------------------------------------------------- damaged by hand

WRONG = (None, "x", "\ud800", [], {}, [1], {"a": 1}, True, 1e308, 10**400, math.nan)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [slow("metrics.jsonl"), "summary.json", "samples.jsonl"]
)
def test_damaged_files_still_make_a_page(name, run, tmp_path):
    """Each value of the first record, replaced by everything that JSON can hold."""
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    lines = (run / name).read_text().splitlines()
    first, rest = json.loads(lines[0]), lines[1:]
    damaged = [{**first, key: wrong} for key in first for wrong in WRONG]
    damaged += [{k: v for k, v in first.items() if k != key} for key in first]
    damaged += [{**first, "memory": {"fused": {"head": x, "step": x}}} for x in WRONG]
    for record in damaged:
        for lines in ([record], [json.dumps(record), *rest]):
            texts = [x if isinstance(x, str) else json.dumps(x) for x in lines]
            (tmp_path / name).write_text("\n".join(texts) + "\n")
            report.write(tmp_path)
    for text in ("[" * 10**5, "", "null", "5", '"x"', "[[]]"):
        (tmp_path / name).write_text(text + "\n")
        report.write(tmp_path)
    assert "<main>" in (tmp_path / "report.html").read_text("utf-8")


@pytest.mark.parametrize(
    "results", ['{"results": [1]}', '{"results": {"a": 1}}', '{"results"', "5"]
)
def test_damaged_benchmarks_left_out_and_named_once(results, run, tmp_path):
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    (tmp_path / "eval.json").write_text(results)
    page = report.ReportPage(tmp_path)
    assert page.write() == [
        f"{tmp_path}/eval.json: is damaged, and left out of report.html"
    ]
    assert page.write() == []
    good = {"results": {"a": {"acc,none": 0.5, "b,none": 10**400, "c,none": "x"}}}
    (tmp_path / "eval.json").write_text(json.dumps(good))
    assert page.write() == []
    text = (tmp_path / "report.html").read_text()
    assert "<td>a</td><td>acc</td>" in text and "<td>b</td>" not in text


def metrics_of(*steps, **fields):
    values = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "seconds": 2.0}
    lines = (json.dumps({"step": step, **values, **fields}) for step in steps)
    return "".join(f"{line}\n" for line in lines)


def test_steps_are_read_once_and_few_are_kept(tmp_path, monkeypatch):
    path, parsed = tmp_path / "metrics.jsonl", []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or loads(text))
    monkeypatch.setattr(report, "_MAX_STEPS", 8)
    steps = report.Steps(path)
    steps.read()
    assert steps.kept == []
    with open(path, "a") as file:
        file.write(metrics_of(*range(1, 100)) + metrics_of(100, held_out_loss=2.0))
        file.write(metrics_of(*range(101, 131)) + '{"step": 131')
    steps.read()
    kept = [step["step"] for step in steps.kept]
    assert len(kept) <= 10 and {1, 100, 130} <= {*kept} and kept == sorted(kept)
    assert steps.seconds == 2.0 * 130 and len(parsed) < 70
    with open(path, "a") as file:
        file.write(', "loss": 0.5}\n')
    before = len(parsed)
    steps.read()
    assert steps.kept[-1] == {"step": 131, "loss": 0.5}
    assert len(parsed) <= before + 2  # the new line alone, when read and when kept
    path.write_text(metrics_of(1, 2))  # a run that was resumed elsewhere
    steps.read()
    assert [step["step"] for step in steps.kept] == [1, 2] and steps.seconds == 4.0
    path.unlink()
    steps.read()
    assert steps.kept == [] and steps.seconds == 0


@pytest.mark.parametrize("name", ["settings.gin", "operative.gin"])
def test_settings_that_are_no_text_still_make_a_page(name, run, tmp_path):
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes(b"run.job = 'sft\xff'\n")
    report.write(tmp_path)
    assert "run.job = &#x27;sft\ufffd&#x27;" in (tmp_path / "report.html").read_text()
