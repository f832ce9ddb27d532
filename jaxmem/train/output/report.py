"""report.html: what happened in a run, on one page that needs no network.

The page is a function of the run's directory, so that it can be written at any time:
metrics.jsonl, about.json, summary.json, eval.json, samples.jsonl and settings.gin.
"""

import contextlib
import json
import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from jaxmem._version import __version__
from jaxmem.base import files
from jaxmem.train.output import charts
from jaxmem.train.output.charts import Line
from jaxmem.train.output.progress import say
from jaxmem.train.output.run_facts import ABOUT, Totals, table

_MIB = 2**20
_MAX_STEPS = 4000  # without an evaluation that are kept for charts
_MAX_NUMBER = 1e300  # differences of larger numbers may overflow
_HEADS = {"fused": "without logits", "materialised": "with logits"}
# Settings that name the subject of a run, unless they are None.
_SUBJECT = re.compile(
    r"^((?:run\.job|model\.checkpoint|data\.source|task\.source) = (?!None).+)$", re.M
)
# As `MetricsWriter` writes them.
_SECONDS = re.compile(rb'"seconds": (\d+(?:\.\d*)?(?:e[+-]?\d+)?)')
_TOKENS = re.compile(rb'"tokens": (\d+)[,}]')
_HELD_OUT = re.compile(rb'"held_out_\w+": (?!null)')
_MAX_SURPRISE = 6.0  # nats; a token of this or more has the strongest colour


class _Panel(NamedTuple):
    """One chart: its title, and the fields that it shows by name of the line."""

    title: str
    fields: Mapping[str, str]
    best: Callable = min  # of values on held-out data


_PANELS = (
    _Panel(
        "Reward",
        {"mean": "reward", "kept": "kept/reward", "held out": "held_out_reward"},
        max,
    ),
    _Panel("Loss", {"training": "loss", "held out": "held_out_loss"}),
    _Panel(
        "Divergence from the teacher, nats",
        {"training": "divergence", "held out": "held_out_divergence"},
    ),
    _Panel("Cross-entropy, nats", {"training": "ce", "held out": "held_out_ce"}),
    _Panel("Reward margin", {"training": "margin", "held out": "held_out_margin"}, max),
    _Panel(
        "Accuracy",
        {
            "training": "accuracy",
            "kept": "kept/accuracy",
            "held out": "held_out_accuracy",
        },
        max,
    ),
    _Panel("Entropy of the policy, nats", {"": "entropy"}),
    _Panel("KL to the initial weights, nats", {"": "kl"}),
    _Panel(
        "Length of completions, tokens",
        {"all": "response_length", "kept": "kept/response_length"},
    ),
    _Panel("Busy slots of the sampler, share", {"": "busy"}),
    _Panel("Tokens clipped, share", {"": "clip_fraction"}),
    _Panel(
        "Groups of equal rewards, share",
        {"all": "degenerate", "kept": "kept/degenerate"},
    ),
    _Panel(
        "Trainer against sampler, nats",
        {"mean": "mismatch_mean", "largest": "mismatch_max"},
    ),
    _Panel(
        "Micro-batches that took an exact forward pass instead of entries",
        {"taken": "head_rejected", "all": "head_checked"},
    ),
    _Panel(
        "Error of log-probabilities, nats",
        {"measured": "head_error", "estimated": "forward_error"},
    ),
    _Panel(
        "Updates since tokens were sampled",
        {"mean": "staleness_mean", "largest": "staleness_max"},
    ),
    _Panel(
        "Seconds of waiting",
        {"trainer": "waiting_seconds", "engine": "engine_idle_seconds"},
    ),
    _Panel("Seconds to give the engine new weights", {"": "push_seconds"}),
    _Panel("Tokens per second of the engine", {"": "engine_tokens_per_second"}),
    _Panel(
        "Tokens of the busiest expert, over the mean",
        {"layers' mean": "routers/load", "worst": "routers/load_worst"},
    ),
    _Panel(
        "Entropy of routers, nats",
        {"layers' mean": "routers/entropy", "worst": "routers/entropy_worst"},
    ),
    _Panel("Gradient norm before clipping", {"": "grad_norm"}),
    _Panel("Learning rate", {"": "learning_rate"}),
)
_RATES = (
    _Panel("Tokens per second", {"": "tokens_per_second"}),
    _Panel("Model FLOPs utilisation", {"": "mfu"}),
)
_STYLE = """
:root{color-scheme:light dark;--ink:#1c2330;--soft:#68727f;--line:#d8dde3;
--card:#fff;--page:#f5f6f8;--a:#2563a8;--b:#c2571a}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#98a2af;--line:#38414d;
--card:#1c222b;--page:#12161c;--a:#6fa8e8;--b:#ec8b4c}}
*{box-sizing:border-box}
body{margin:0 auto;padding:16px;max-width:1500px;background:var(--page);
color:var(--ink);font:15px/1.45 system-ui,sans-serif}
h1{font-size:21px;margin:0;overflow-wrap:anywhere}
h2{font-size:16px;margin:28px 0 10px}
p{margin:4px 0;color:var(--soft)}
.tiles,.charts{display:grid;gap:12px}
.tiles{grid-template-columns:repeat(auto-fill,minmax(130px,1fr));margin-top:14px}
.charts{grid-template-columns:repeat(auto-fill,minmax(min(100%,320px),1fr))}
.card{background:var(--card);border:1px solid var(--line);border-radius:6px;
padding:10px 12px;min-width:0}
.card b{display:block;font-size:19px;font-variant-numeric:tabular-nums}
.card h3{font-size:14px;font-weight:600;margin:0 0 4px}
.tiles span{color:var(--soft);font-size:13px}
svg{display:block;width:100%;height:auto}
svg text{font-size:11px;fill:var(--soft)}
.end{text-anchor:end}.middle{text-anchor:middle}
.grid{stroke:var(--line);stroke-width:1}
polyline{fill:none;stroke-width:1.8;stroke-linejoin:round}
.s0{stroke:var(--a)}.s1{stroke:var(--b)}.d0{fill:var(--a)}.d1{fill:var(--b)}
.t0,.t1{font-weight:400;margin-left:8px}.t0{color:var(--a)}.t1{color:var(--b)}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;vertical-align:top;padding:6px 10px 6px 0;
border-bottom:1px solid var(--line)}
th{font-weight:600}.right{text-align:right;white-space:nowrap}
.bars th,.bars td{border:0;padding:3px 10px 3px 0;white-space:nowrap}
.bar{width:60%;min-width:60px}.bar div{background:var(--a);height:14px;
min-width:1px;border-radius:2px}
.text{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.6 ui-monospace,monospace}
.samples td:first-child{width:38%}
.facts th{white-space:nowrap}.facts td{width:100%;overflow-wrap:anywhere}
.text span,p span{border-radius:2px;color:var(--ink)}
.said,.text .said,p .said{color:var(--soft);font-style:italic}
pre{overflow-x:auto;margin:0;font:13px/1.5 ui-monospace,monospace}
@media(max-width:600px){.samples,.samples tbody,.samples tr,.samples td{display:block}
.samples thead{display:none}.samples td:first-child{width:auto}
.samples td{border:0;padding:2px 0}.samples tr{border-bottom:1px solid var(--line);
padding:8px 0}.samples .right{text-align:left;color:var(--soft)}
.samples .right::before{content:"reward "}}
"""


class ReportPage:
    """The page of one run, which reads each line of metrics.jsonl once."""

    def __init__(self, out_dir: Path):
        self._out_dir, self._steps = out_dir, Steps(out_dir / "metrics.jsonl")
        self._said: set[str] = set()

    def write(self) -> list[str]:
        """Write report.html from what is in the directory; without steps, no page.

        Returns:
            Lines about files that are left out because they are damaged, each once.

        Raises:
            WriteError: the file still has its old content.
        """
        self._steps.read()
        if not self._steps.kept:
            return []
        evaluated, lines = _read_evaluation(self._out_dir / "eval.json")
        page = "".join(_page_parts(self._out_dir, self._steps, evaluated))
        # Half of a surrogate pair, which JSON can hold, is no text.
        content = page.encode("utf-8", "replace")
        files.write_whole(self._out_dir / "report.html", content)
        new = [line for line in lines if line not in self._said]
        self._said.update(new)
        return new


def write(out_dir: Path) -> list[str]:
    """Write report.html of a run once; see `ReportPage.write`."""
    return ReportPage(out_dir).write()


def finish(out_dir: Path, console: Console) -> None:
    """Write the page at a run's end, and print the names of the run's files."""
    for line in write(out_dir):
        say(console, line)
    shown = files.shown(out_dir)
    say(console, f"saved in {shown}: summary.json, report.html, report.png")


class Steps:
    """The steps of a metrics.jsonl that grows.

    Attributes:
        kept: the steps of a short run, in order; of a long run the evaluated steps, the
            first, the last, and every n-th of the others.
        seconds: time of all steps, kept or not.
        tokens: tokens of all steps.
    """

    def __init__(self, path: Path):
        self._path = path
        self._forget_steps()

    def _forget_steps(self) -> None:
        self._identity: tuple[int, int] | None = None  # of the file
        self._end = 0  # offset behind the last line that was read
        self._count, self._every = 0, 1
        self._others: dict[int, dict[str, Any]] = {}  # by their number
        self._evaluated: dict[int, dict[str, Any]] = {}
        self._last = 0, b""
        self.seconds, self.tokens = 0.0, 0

    @property
    def kept(self) -> list[dict[str, Any]]:
        """The kept steps; see the class."""
        steps = self._others | self._evaluated | _parse_step(*self._last)
        return [steps[number] for number in sorted(steps)]

    def read(self) -> None:
        """Read the new lines; all lines, if the file was replaced or has shrunk."""
        try:
            file = open(self._path, "rb")
        except FileNotFoundError:
            self._forget_steps()
            return
        with file:
            status = os.fstat(file.fileno())
            identity = status.st_dev, status.st_ino
            if identity != self._identity or status.st_size < self._end:
                self._forget_steps()
            self._identity = identity
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):  # it is being written
                    break
                self._end += len(line)
                self._add_line(line)

    def _add_line(self, line: bytes) -> None:
        """Count a step, and parse it if it is kept: parsing all of them is slow."""
        number, self._count = self._count, self._count + 1
        self._last = number, line
        if match := _SECONDS.search(line):
            self.seconds += _finite_number(float(match[1])) or 0.0
        if match := _TOKENS.search(line):
            self.tokens += int(match[1])
        is_evaluated = _HELD_OUT.search(line) is not None
        if is_evaluated or number % self._every == 0:
            (self._evaluated if is_evaluated else self._others).update(
                _parse_step(number, line)
            )
        if len(self._others) > _MAX_STEPS:
            self._every *= 2
            kept = ((n, x) for n, x in self._others.items() if n % self._every == 0)
            self._others = dict(kept)


def _parse_step(number: int, line: bytes) -> dict[int, dict[str, Any]]:
    """{number: step}; {} for a damaged line."""
    step = _parse_object(line.decode("utf-8", "replace"))
    return {number: step} if type(step.get("step")) is int else {}


def _read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one per line, without damaged ones."""
    return filter(None, map(_parse_object, _read_text(path).split("\n")))


def _parse_object(text: str) -> dict[str, Any]:
    """The JSON object of a text; {} for any other text."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    return {}


def _read_evaluation(path: Path) -> tuple[Mapping[str, Mapping[str, Any]], list[str]]:
    """Numbers of `jaxmem eval` by task, and lines that say why there are none."""
    if not (text := _read_text(path)):
        return {}, []
    results = _parse_object(text).get("results")
    if isinstance(results, dict) and all(isinstance(x, dict) for x in results.values()):
        return results, []
    return {}, [f"{path}: is damaged, and left out of report.html"]


def _read_text(path: Path) -> str:
    """The text of a file; "" if it does not exist."""
    return path.read_text("utf-8", errors="replace") if path.exists() else ""


def _page_parts(
    out_dir: Path, history: Steps, evaluated: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    steps, summary = history.kept, _parse_object(_read_text(out_dir / "summary.json"))
    title = escape(out_dir.resolve().name)
    yield (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><main><h1>{title}</h1>"
    )
    device = f" on {summary['device']}" if "device" in summary else ""
    yield f"<p>step {steps[-1]['step']:,}{escape(device)}, jaxmem {__version__}</p>"
    if subject := ", ".join(_SUBJECT.findall(_read_text(out_dir / "operative.gin"))):
        yield f"<p>{escape(subject)}</p>"
    tiles = "".join(
        [*_result_cards(steps, history.seconds), *_median_cards(_RATES, steps)]
    )
    yield f'<section class="tiles">{tiles}</section>'
    yield from _benchmark_table(evaluated)
    if last := "".join(_last_value_cards(_PANELS, steps)):
        yield f'<h2>Last values</h2><section class="tiles">{last}</section>'
    cards = "".join(_chart_cards(steps))
    yield f'<h2>By step</h2><section class="charts">{cards}</section>'
    about = _parse_object(_read_text(out_dir / ABOUT))
    totals = Totals(steps[-1]["step"], history.seconds, history.tokens)
    yield from table(about, _read_text(out_dir / "started.txt"), totals)
    yield from _memory_bars(summary.get("memory"))
    if samples := [*filter(_is_sample, _read_objects(out_dir / "samples.jsonl"))]:
        yield from _sample_table(samples)
    if settings := _read_text(out_dir / "settings.gin"):
        yield "<h2>Settings that differ from the defaults</h2>"
        yield f'<div class="card"><pre>{escape(settings)}</pre></div>'
    yield "</main></body></html>\n"


def _finite_points(
    steps: Sequence[Mapping[str, Any]], field: str
) -> list[tuple[float, float]]:
    """The finite values of a field."""
    pairs = [
        (_finite_number(step["step"]), _finite_number(_field_value(step, field)))
        for step in steps
    ]
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def _finite_number(value: Any) -> float | None:
    """A number that a chart can show; None for anything else."""
    good = isinstance(value, (int, float)) and abs(value) <= _MAX_NUMBER  # and no NaN
    return float(value) if good else None


def _is_sample(sample: Mapping[str, Any]) -> bool:
    """True if an object of a file, which may be damaged, is a row of `Job.samples`."""
    tokens, logprobs = sample.get("tokens"), sample.get("logprobs")
    if not (isinstance(tokens, list) and isinstance(logprobs, list)):
        return False
    texts = all(isinstance(text, str) for text in (sample.get("prompt"), *tokens))
    reward = sample.get("reward", "")
    rewarded = reward is None or _finite_number(reward) is not None
    numbers = all(x is None or _finite_number(x) is not None for x in logprobs)
    return texts and rewarded and numbers and len(tokens) == len(logprobs)


def _result_cards(steps: Sequence[Mapping[str, Any]], total: float) -> Iterator[str]:
    """Cards of results, on held-out data where there are any, and of the run's time."""
    scored = [
        (panel, points)
        for panel in _PANELS
        if (points := _finite_points(steps, panel.fields.get("held out", "")))
    ]
    for panel, points in scored:
        step, best = panel.best(points, key=lambda point: point[1])
        note = f"best {charts.number(best)}, step {int(step):,}"
        yield _html_card(f"{panel.title}, held out", charts.number(points[-1][1]), note)
    if not scored:
        yield next(_last_value_cards(_PANELS, steps), "")
    seconds = [value for _, value in _finite_points(steps, "seconds")]
    if seconds:
        note = f"{charts.number(statistics.median(seconds))} s per step (median)"
        yield _html_card("Time of all steps", _format_duration(total), note)


def _format_duration(seconds: float) -> str:
    minutes, seconds_left = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60:,} h {minutes % 60} min"
    return f"{minutes} min {seconds_left} s" if minutes else f"{seconds_left} s"


def _last_value_cards(
    panels: Sequence[_Panel], steps: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Cards with the last and the first value of each panel's first line."""
    for panel in panels:
        points = _finite_points(steps, next(iter(panel.fields.values())))
        if points:
            first, last = (charts.number(points[i][1]) for i in (0, -1))
            yield _html_card(panel.title, last, f"from {first}")


def _median_cards(
    panels: Sequence[_Panel], steps: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Cards with the median of each panel's first line, and its last value."""
    for panel in panels:
        points = _finite_points(steps, next(iter(panel.fields.values())))
        if points:
            median = statistics.median(value for _, value in points)
            note = f"median; last {charts.number(points[-1][1])}"
            yield _html_card(panel.title, charts.number(median), note)


def _html_card(title: str, value: str, note: str) -> str:
    return (
        f'<div class="card"><span>{escape(title)}</span><b>{value}</b>'
        f"<span>{escape(note)}</span></div>"
    )


def _chart_cards(steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for panel in [*_PANELS, *_RATES, *_reward_panels(steps)]:
        lines = [
            Line(name, points, marked=name == "held out")
            for name, field in panel.fields.items()
            if (points := _finite_points(steps, field))
        ]
        if lines:
            chart = charts.chart(panel.title, lines)
            title = escape(panel.title) + charts.legend(lines)
            yield f'<div class="card"><h3>{title}</h3>{chart}</div>'


def _field_value(step: Mapping[str, Any], field: str) -> Any:
    """The value of a field, or of an entry of a group such as "rewards/length"."""
    group, slash, name = field.partition("/")
    value = step.get(group)
    if not slash:
        return value
    return value.get(name) if isinstance(value, Mapping) else None


def _reward_panels(steps: Sequence[Mapping[str, Any]]) -> Iterator[_Panel]:
    """A panel for each reward function, where there are several."""
    rewards = steps[-1].get("rewards")
    for name in rewards if isinstance(rewards, Mapping) else ():
        yield _Panel(f"Reward: {name}", {"": f"rewards/{name}"})


def _benchmark_table(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A table of the numbers of `jaxmem eval`, by task, with standard errors."""
    if not results:
        return
    yield (
        '<h2>Benchmarks</h2><div class="card wide"><table><thead><tr><th>Task</th>'
        '<th>Metric</th><th class="right">Value</th><th class="right">Standard error'
        "</th></tr></thead><tbody>"
    )
    for task, metrics in results.items():
        for key, value in metrics.items():
            metric, _, filtered = key.partition(",")
            if metric == "sample_len":  # the number of documents, and no metric
                continue
            value, error = map(
                _finite_number, (value, metrics.get(f"{metric}_stderr,{filtered}"))
            )
            if value is None or metric.endswith("_stderr"):
                continue
            shown = "" if error is None else charts.number(error)
            yield (
                f"<tr><td>{escape(task)}</td><td>{escape(metric)}</td>"
                f'<td class="right">{charts.number(value)}</td>'
                f'<td class="right">{shown}</td></tr>'
            )
    yield "</tbody></table></div>"


def _memory_bars(memory: Any) -> Iterator[str]:
    sizes = {}
    with contextlib.suppress(LookupError, TypeError, AttributeError):  # a damaged file
        sizes = {
            f"{label} {_HEADS.get(name, name)}": cost[part]["temporary"] / _MIB
            for part, label in (("head", "head alone"), ("step", "train step"))
            for name, cost in memory.items()
        }
    if not sizes:
        return
    yield "<h2>Temporary memory by head, from the compiler</h2>"
    yield f'<div class="card wide">{charts.bars(sizes, "MiB")}</div>'


def _sample_table(samples: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rewarded = any(sample["reward"] is not None for sample in samples)
    heading = '<th class="right">Reward</th>' if rewarded else ""
    has_replies = any(None in sample["logprobs"] for sample in samples)
    about_replies = (
        "; replies of an environment are " + _token_span("slanted", None)
        if has_replies
        else ""
    )
    scale = (
        _token_span("certain", 0.0),
        _token_span(f"{_MAX_SURPRISE:g} nats and more", -_MAX_SURPRISE),
    )
    yield (
        "<h2>Samples of the last rollout</h2><p>Tokens are coloured by how improbable "
        f"they were: {scale[0]} to {scale[1]}{about_replies}.</p>"
        '<div class="card wide"><table class="samples"><thead><tr><th>Prompt</th>'
        f"<th>Completion</th>{heading}</tr></thead><tbody>"
    )
    for sample in samples:
        tokens = zip(sample["tokens"], sample["logprobs"], strict=True)
        spans = "".join(_token_span(text, logprob) for text, logprob in tokens)
        yield (
            f'<tr><td class="text">{escape(sample["prompt"])}</td>'
            f'<td class="text">{spans}</td>{_reward_cell(sample["reward"])}</tr>'
        )
    yield "</tbody></table></div>"


def _reward_cell(value: float | None) -> str:
    return "" if value is None else f'<td class="right">{charts.number(value)}</td>'


def _token_span(text: str, logprob: float | None) -> str:
    # A token without a visible character still shows its colour.
    shown = escape(text.replace("\n", "↵\n") if not text.strip("\n") else text)
    if logprob is None:
        return f'<span class="said">{shown}</span>'
    share = min(max(0.0, -logprob) / _MAX_SURPRISE, 1.0)
    return (
        f'<span style="background:rgba(226,105,30,{0.85 * share:.2f})" '
        f'title="ln p = {logprob:.3f}">{shown}</span>'
    )
