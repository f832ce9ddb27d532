"""Documentation: snippets are executed, commands parsed, and numbers looked up."""

import ast
import dataclasses
import doctest
import functools
import importlib
import importlib.util
import inspect
import io
import json
import pkgutil
import re
import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

import jaxmem
from benchmarks import results
from jaxmem.checkpoints import config_writer
from jaxmem.commands import cli
from jaxmem.train import configuration
from tests.helpers.cases import full
from tests.helpers.layers import FORWARDS
from tests.helpers.markdown import blocks, commands

# Examples are tiny: nearly all of their time is compilation.
pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    path
    for pattern in ("*.md", "benchmarks/*.md", "docs/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]
README_BYTES = 9 * 1024  # without comments, which name rows of records
FIRST_SCREEN = 25  # lines
# Packages, and what they import at once: its extra is that of development alone.
OPTIONAL = {"evaluate": "lm_eval"}


def _modules():
    for info in pkgutil.walk_packages(jaxmem.__path__, "jaxmem."):
        if info.name in FORWARDS:
            continue
        behind = [k for k in OPTIONAL if info.name.startswith(f"jaxmem.{k}.")]
        if any(importlib.util.find_spec(OPTIONAL[name]) is None for name in behind):
            continue
        if not info.name.endswith(".__main__"):
            yield importlib.import_module(info.name)


MODULES = [jaxmem, *_modules()]


# ---------------------------------------------------------------- docstrings


def _examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for module in MODULES for test in finder.find(module)]
    return sorted((test for test in found if test.examples), key=lambda test: test.name)


def _public():
    """The verbs, and the heads: what a user would look up."""
    for name, value in vars(jaxmem).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            yield value
    for module in MODULES:
        if module.__name__.startswith("jaxmem.heads.") and hasattr(module, "LMHead"):
            yield module.LMHead


def test_methods_say_what_they_do_or_inherit_it():
    """In modules in which the linter does not look."""
    names = "jaxmem.train.jobs.", "jaxmem.data.forms", "jaxmem.data.token_rows"
    names = (*names, "jaxmem.head.verbs.", "jaxmem.checkpoints.families.")
    mixers = "layers", "latent", "delta_mixer", "feed_forward", "mixture"
    names = (*names, *(f"jaxmem.models.{name}" for name in mixers))
    without = [
        f"{kind.__qualname__}.{name}"
        for module in MODULES
        if module.__name__.startswith(names)
        for kind in vars(module).values()
        if inspect.isclass(kind) and kind.__module__ == module.__name__
        for name, value in vars(kind).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, property))
        and not inspect.getdoc(getattr(kind, name))
    ]
    assert not without


# The functions' own tests compute what their examples do.
@pytest.mark.full
@pytest.mark.every_function
@pytest.mark.parametrize("example", _examples(), ids=lambda test: test.name)
def test_docstring_example(example):
    said = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(example, out=said.write)
    assert runner.summarize(verbose=False).failed == 0, said.getvalue()


@pytest.mark.parametrize(
    "thing", [*_public()], ids=lambda x: f"{x.__module__}.{x.__name__}"
)
def test_every_public_thing_has_an_example(thing):
    assert thing.__doc__ is not None
    assert doctest.DocTestParser().get_examples(thing.__doc__)


def test_public_things_are_found():
    names = {thing.__name__ for thing in _public()}
    assert names >= {"logprobs", "token_stats", "entropy", "report", "LMHead"}


# ---------------------------------------------------------- blocks of a document


def run_python(text, name):
    """Executes every python block, in order, in one namespace."""
    namespace = {"__name__": "__main__"}
    for block in blocks(text):
        if block.language != "python":
            continue
        if block.text.lstrip().startswith(">>>"):
            parser, said = doctest.DocTestParser(), io.StringIO()
            test = parser.get_doctest(block.text, namespace, name, name, block.line - 1)
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
            runner.run(test, out=said.write, clear_globs=False)
            assert runner.failures == 0, said.getvalue()
            namespace.update(test.globs)
        else:
            padded = "\n" * (block.line - 1) + block.text  # tracebacks show the line
            exec(compile(padded, name, "exec"), namespace)
    return namespace


# The functions that they call have quick tests of their own.
TRAINING_PAGES = (
    "own_model", "heads", "sampled", "start", "meshes", "rl_losses", "python",
)  # fmt: skip


@pytest.mark.parametrize(
    "document",
    [full(x) if x.stem in TRAINING_PAGES else x for x in DOCUMENTS],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_python_blocks_run(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_python(document.read_text("utf-8"), str(document))


# ------------------------------------------------------------------ commands


def check_command(words):
    """Raises if a command names what is not there."""
    words = [words[0].removeprefix(".venv/bin/"), *words[1:]]
    if words[:3] == ["python", "-m", "jaxmem"]:
        words = ["jaxmem", *words[3:]]
    if words[0] == "jaxmem":
        _check_jaxmem(words[1:])
    if "install" in words and "pip" in words:
        _check_extras(words)
    for word in words[1:]:
        if re.fullmatch(r"(\.ci|benchmarks|configs|tests)/[\w./-]+", word):
            assert (ROOT / word).exists(), f"{word} does not exist"


def _check_jaxmem(arguments):
    try:
        parsed = cli._parse(arguments)
    except SystemExit as stopped:  # --help and --version exit with 0
        assert stopped.code == 0, f"jaxmem {shlex.join(arguments)} does not parse"
        return
    if "overrides" in parsed and parsed.file is not None:
        from jaxmem.train import configuration

        unread = configuration.DATA_KEYS if arguments[0] == "plan" else ()
        configuration.load(parsed.file, parsed.overrides, unread)


def _check_extras(words):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for word in words:
        for extras in re.findall(r"^(?:jaxmem|\.)\[([\w,]+)\]", word):
            unknown = set(extras.split(",")) - set(project["optional-dependencies"])
            assert not unknown, f"{word}: no such extra {unknown}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_are_real(document, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)  # as a reader in a checkout
    for words in commands(document.read_text("utf-8")):
        check_command(words)


# docs/protocol.md includes the last one.
SITE = [path for path in DOCUMENTS if path.is_relative_to(ROOT / "docs")]
SITE += [ROOT / "benchmarks" / "README.md"]
JOB_PAGES = sorted((ROOT / "docs" / "jobs").glob("*.md"))
COMMAND_COLUMNS = 72  # what a page of 900 pixels shows without a scroll bar


def check_command_lines(text):
    """Raises for a line of a command that a page cuts, or for a shipped file's path."""
    for block in blocks(text):
        lines = block.text.splitlines()
        if block.language == "console":  # the rest is output
            lines = [line for line in lines if line.startswith(("$ ", "    "))]
        elif block.language not in ("bash", "sh", "shell"):
            lines = [
                line for line in lines if re.match(r"(\$ )?jaxmem [a-z]+ \w", line)
            ]
        long = [line for line in lines if len(line) > COMMAND_COLUMNS]
        assert not long, f"break at {COMMAND_COLUMNS} columns by a backslash: {long}"
        paths = [line for line in lines if re.search(r"\bconfigs/[\w/]+\.gin", line)]
        assert not paths, f"name a shipped file without configs/: {paths}"


@pytest.mark.parametrize("document", SITE, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_fit_the_page(document):
    check_command_lines(document.read_text("utf-8"))


# ------------------------------------------------------------ tables of numbers

SOURCE = re.compile(r"^<!-- from ([^\s:]+)(?:: ([\w ,-]+))? -->$")
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


class Table(NamedTuple):
    """A table below `<!-- from PATH: COLUMNS -->`.

    COLUMNS are those of the CSV that the table's own quote: one entry, between commas,
    for each column of the table that is no key, from the second on. An entry has a name
    for each number of a cell, in order; - for a column of words.
    """

    source: str
    columns: list[list[str]]
    header: list[str]
    rows: list[list[str]]


def tables(text):
    """The tables whose numbers have a source, in order."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("<!-- from"):
            continue
        source = SOURCE.match(line)
        assert source, f"line {number + 1}: expected <!-- from PATH.csv: COLUMNS -->"
        below = [row.strip() for row in lines[number + 1 :]]
        while below and not below[0]:
            del below[0]
        height = next((i for i, row in enumerate([*below, ""]) if row[:1] != "|"), 0)
        assert height >= 3, f"line {number + 1}: no table below {line}"
        header, _, *rows = [_cells(row) for row in below[:height]]
        columns = [entry.split() for entry in (source[2] or "").split(",")]
        yield Table(source[1], [names for names in columns if names], header, rows)


def _cells(row):
    return [re.sub(r"[*`]", "", cell).strip() for cell in row.strip("|").split("|")]


def check_table(table, records):
    """Raises for a row whose numbers no record has, rounded to the decimals shown.

    A column of the table with the name of a column of the CSV is a key. All of a row's
    keys and numbers must be one record's, each in the column that is named for it.
    """
    header, fields = table.header, set(records[0])
    keys = [i for i, name in enumerate(header) if name in fields]
    others = [i for i in range(1, len(header)) if i not in keys]
    assert len(table.columns) == len(others), (
        f"{table.source}: name the CSV's columns of {[header[i] for i in others]}, "
        f"got {table.columns}"
    )
    unknown = {name for names in table.columns for name in names} - fields - {"-"}
    assert not unknown, f"{table.source} has no columns {sorted(unknown)}"
    for row in table.rows:
        assert len(row) == len(header), f"{row} is not as wide as {header}"
        agreeing = [
            r for r in records if all(_same(row[i], r[header[i]]) for i in keys)
        ]
        assert agreeing, f"no record has { ({header[i]: row[i] for i in keys}) }"
        shown = [
            pair
            for i, names in zip(others, table.columns, strict=True)
            for pair in _numbers(row[i], names)
        ]
        assert any(
            all(_rounds_to(record[name], number) for name, number in shown)
            for record in agreeing
        ), f"no record has {shown} of {row}"


def _numbers(cell, names):
    """(column of the CSV, number) of each number of a cell."""
    numbers = NUMBER.findall(cell.replace("\N{MINUS SIGN}", "-"))
    if names == ["-"]:
        assert not numbers, f"{cell!r} has a number, and no column is named for it"
        return []
    assert len(numbers) in (0, len(names)), f"{cell!r} has not a number of each {names}"
    return [*zip(names, numbers, strict=False)]


def _same(cell, value):
    return cell == value or (NUMBER.fullmatch(cell) and _rounds_to(value, cell))


def _rounds_to(value, shown):
    """True if a CSV's value is the shown number, to the decimals shown."""
    shown = shown.replace(",", "")
    mantissa, _, exponent = shown.partition("e")
    decimals = len(mantissa.partition(".")[2])
    try:
        rounded = format(float(value), f".{decimals}{'e' if exponent else 'f'}")
    except ValueError:
        return False
    return float(rounded) == float(shown)


@functools.cache
def _records(source):
    return results.read(ROOT / source)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_tables_quote_their_records(document):
    for table in tables(document.read_text("utf-8")):
        check_table(table, _records(table.source))


# --------------------------------------------------- numbers outside such tables

INLINE = re.compile(
    r'<!-- (\S+\.csv)((?: \w+=(?:"[^"]*"|[^\s":]+))+): (\w+(?: \w+)*) -->'
)


class Quote(NamedTuple):
    """Numbers in front of `<!-- PATH.csv KEY=VALUE ...: COLUMN ... -->`.

    They are the last ones of their paragraph or cell, as many as there are columns.
    """

    source: str
    keys: dict[str, str]
    columns: list[str]
    numbers: list[str]


def quotes(text):
    """The numbers with a source of their own, in order."""
    text = _without_blocks(text)
    begun = len(re.findall(r"<!-- \S+\.csv", text))
    found = list(INLINE.finditer(text))
    assert begun == len(found), "expected <!-- PATH.csv KEY=VALUE ...: COLUMN ... -->"
    for match in found:
        before = re.split(r"-->|\||\n\s*\n", text[: match.start()])[-1]
        numbers, columns = NUMBER.findall(before), match[3].split()
        assert len(numbers) >= len(columns), f"no number before {match[0]}"
        keys = dict(pair.split("=", 1) for pair in shlex.split(match[2]))
        yield Quote(match[1], keys, columns, numbers[-len(columns) :])


def check_quote(quote, records):
    """Raises unless all numbers are one record's that agrees with the keys."""
    unknown = {*quote.keys, *quote.columns} - {*records[0]}
    assert not unknown, f"{quote.source} has no columns {sorted(unknown)}"
    agreeing = [
        r for r in records if all(_same(v, r[name]) for name, v in quote.keys.items())
    ]
    assert agreeing, f"no record has {quote.keys}"
    shown = [*zip(quote.columns, quote.numbers, strict=True)]
    assert any(all(_rounds_to(r[name], n) for name, n in shown) for r in agreeing), (
        f"no record of {quote.keys} has {shown}"
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_numbers_quote_their_records(document):
    for quote in quotes(document.read_text("utf-8")):
        check_quote(quote, _records(quote.source))


# --------------------------------------------------------- links and completeness


def _without_blocks(text):
    return re.sub(r"^ *```.*?^ *```[ ]*$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text):
    """The anchors of headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", _without_blocks(text), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", h.lower()).strip().replace(" ", "-") for h in headings
    }


def check_links(document, text):
    """Raises for a link or an image that leads nowhere in this repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_blocks(text)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        assert path.exists(), f"{target} does not exist"
        if anchor:
            there = path.read_text("utf-8") if name else text
            assert anchor in anchors(there), f"{target}: no such heading"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(document):
    check_links(document, document.read_text("utf-8"))


STORIES = sorted((ROOT / "docs" / "stories").glob("*.ipynb"))


@pytest.mark.parametrize("story", STORIES, ids=lambda p: p.stem)
def test_stories_are_saved_with_outputs(story):
    cells = json.loads(story.read_text("utf-8"))["cells"]
    check_links(
        story, "".join("".join(c["source"]) for c in cells if "outputs" not in c)
    )
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code)
    kinds = {output["output_type"] for cell in code for output in cell["outputs"]}
    assert "error" not in kinds and "display_data" in kinds
    said = [
        "".join(output.get("text", "")) for cell in code for output in cell["outputs"]
    ]
    assert not any("\x1b[2K" in text for text in said), "a progress bar was drawn"
    typed = "".join("".join(cell["source"]) for cell in code)
    assert "os.chdir" not in typed and "cli.main" not in typed


def test_readme_is_one_screen_or_two():
    text = (ROOT / "README.md").read_text("utf-8")
    shown = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    assert len(shown.encode()) <= README_BYTES


def test_readme_begins_with_sentence_command_and_table():
    text = (ROOT / "README.md").read_text("utf-8")
    first = "\n".join(text.splitlines()[:FIRST_SCREEN])
    sentence, command, table = (
        first.index(part) for part in ("jaxmem fine-tunes", "jaxmem train", "| Qwen3")
    )
    assert sentence < command < table
    assert first.count("\n| ") > 5


def test_citations_are_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    page = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    assert f"\nversion: {jaxmem.__version__}\n" in citation
    assert f"version = {{{jaxmem.__version__}}}," in page


def _reference(name):
    return (ROOT / "docs" / "reference" / name).read_text("utf-8")


def test_every_section_is_in_the_reference():
    from jaxmem.train import configuration

    listed = re.findall(r"^```{gin-keys} (\w+)$", _reference("config.md"), re.MULTILINE)
    assert listed == [*configuration.sections()]


PRIVATE = {"base", "commands", "head"}
PRIVATE |= {name.partition(".")[2] for name in FORWARDS}


def test_every_package_is_in_the_reference():
    public = {
        info.name
        for info in pkgutil.iter_modules(jaxmem.__path__)
        if not info.name.startswith("_") and info.name not in PRIVATE
    }
    pages = {path.stem for path in (ROOT / "docs" / "reference").glob("*.md")}
    assert pages == public | {"jaxmem", "cli", "config"}
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    assert {f"reference/{page}" for page in pages} <= {*index.split()}


def test_reference_lists_functions_by_importance():
    page = _reference("jaxmem.md")
    listed = re.findall(r"^\.\. auto\w+:: jaxmem\.(\w+)$", page, re.MULTILINE)
    public = {
        name
        for name, value in vars(jaxmem).items()
        if name[0] != "_" and not inspect.ismodule(value)
    }
    assert {*listed} == public | {"plan"} and len(listed) == len({*listed})
    assert listed[:2] == ["logprobs", "Head"] and listed[-1] == "report"


def test_every_page_is_in_the_index():
    docs = ROOT / "docs"
    pages = [*docs.rglob("*.md"), *docs.rglob("*.ipynb")]
    names = {path.relative_to(docs).with_suffix("").as_posix() for path in pages}
    index = (docs / "index.md").read_text("utf-8")
    assert names - {"index"} <= {*index.split()}, "add it to a toctree"


def test_reading_order_names_functions_that_exist():
    page = (ROOT / "docs" / "code.md").read_text("utf-8")
    entries = re.findall(r"^\d+\. \*\*`(.+?)`\*\*, (.+?):", page, re.MULTILINE)
    assert len(entries) > 15
    for path, names in entries:
        tree = ast.parse((ROOT / "jaxmem" / path).read_text("utf-8"))
        kinds = ast.FunctionDef, ast.ClassDef
        defined = {x.name for x in ast.walk(tree) if isinstance(x, kinds)}
        assert {*re.findall(r"`(\w+)`", names)} <= defined, path


QUESTIONS = {  # what newcomers ask: the page that answers, and words of the answer
    "How does the head get into my model?": ("heads.md", "LMHead(tied_to="),
    "How do I fine-tune on conversations?": ("jobs/sft.md", "sft_lora.gin"),
    "How do I train with my own reward?": ("rewards.md", "def score("),
    "Does an 8B run fit?": ("plan.md", "## Does an 8B run fit"),
    "How is a vocabulary split over GPUs?": ("meshes.md", 'vocab="tensor"'),
    "What does this error mean?": ("troubleshooting.md", "### `"),
    "Which models load?": ("families.md", "Qwen3ForCausalLM"),
    "How do I start under SLURM?": ("hosts.md", "sbatch"),
    "Does it run on TPUs?": ("plan.md", "## TPUs"),
    "How do I evaluate on benchmarks?": ("evaluate.md", "jaxmem eval"),
    "How do I train my own NNX model?": ("own_model.md", "nnx.split"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_within_two_links_of_index(question):
    docs = ROOT / "docs"
    page, answer = docs / QUESTIONS[question][0], QUESTIONS[question][1]
    assert answer in page.read_text("utf-8")
    first = _pages_linked(docs / "index.md")
    assert page in first.union(*map(_pages_linked, first))


def _pages_linked(page):
    text = _without_blocks(page.read_text("utf-8"))
    links = re.findall(r"\]\(([^)\s#]+\.md)(?:#[^)]*)?\)", text)
    return {(page.parent / link).resolve() for link in links if "://" not in link}


def _section(page, anchor):
    """The text of a page from the heading of an anchor to the next of its level."""
    if not anchor:
        return page
    text = page[page.index(_heading(page, anchor)) :]
    level = re.match("#+", text)[0]
    return re.split(rf"\n#{{1,{len(level)}}} ", text)[0]


def _heading(page, anchor):
    headings = re.findall(r"^#+ .+$", _without_blocks(page), re.MULTILINE)
    return next(x for x in headings if anchor in anchors(x))


def _first_screen(text):
    """About what a window shows: of a long table, its first rows."""
    return "\n".join(text.splitlines()[:45])


# What newcomers ask, in the order of how often: the links that answer from the first
# screen of the site ("" is that screen itself), and words of the answer there.
FIRST_QUESTIONS = {
    "How do I install it on my GPU?": {"": "'jax[cuda13]<0.13'"},
    "What do other cards get?": {"faq.md#which-cards-does-it-run-on": "A100"},
    "How do I fine-tune Qwen3 on my chats?": {"": "model.checkpoint=Qwen/Qwen3"},
    "How do I use a data set of the Hub?": {
        "hub.md#data-sets-of-the-hub": "hf://OWNER/NAME"
    },
    "Which format must my file have?": {"data.md": '{"messages": ['},
    "Does my model fit, and how fast is it?": {
        "": "| Qwen3-8B | LoRA, chats |",
        "recipes.md": "jaxmem plan recipes/",
        "plan.md#does-an-8b-run-fit": "fits",
    },
    "Which learning rate, rank and batch?": {"recipes.md": "2e-4, cosine"},
    "How do I chat with, merge and export the result?": {"after.md": "--chat"},
    "How do I quantise the result for Ollama?": {
        "after.md#llamacpp-and-ollama": "convert_hf_to_gguf.py"
    },
    "What does a key of TRL, Axolotl, verl or MaxText become?": {
        "coming_from.md": "TRL"
    },
    "It stopped or says an error: what now?": {"troubleshooting.md": "### `"},
    "What can it not do?": {"faq.md": "| images, audio, video |"},
    "How does it compare?": {"faq.md": "| not there | what to do instead |"},
    "What code does it run?": {"security.md": "## What runs code"},
}


@pytest.mark.parametrize(
    "first, folder", [("docs/index.md", ""), ("README.md", "docs/")]
)
@pytest.mark.parametrize("question", FIRST_QUESTIONS)
def test_first_questions_are_answered_within_a_click(question, first, folder):
    index = (ROOT / first).read_text("utf-8")
    linked = {*re.findall(r"\]\(([^)\s]+)\)", index)}
    for link, answer in FIRST_QUESTIONS[question].items():
        name, _, anchor = link.partition("#")
        assert not link or folder + link in linked
        page = (ROOT / "docs" / name).read_text("utf-8") if name else index
        screen = _first_screen(_section(page, anchor))
        assert answer in screen, f"{link or first} does not show {answer!r}"


FIRST_PAGES = ("start", "training", "data", *(f"jobs/{x.stem}" for x in JOB_PAGES))


@pytest.mark.parametrize("name", FIRST_PAGES)
def test_first_pages_link_their_terms(name):
    page = ROOT / "docs" / f"{name}.md"
    assert ROOT / "docs" / "glossary.md" in _pages_linked(page)


def _described_extras():
    """(names, page) of each row of the table of extras on the first page."""
    text = (ROOT / "docs" / "start.md").read_text("utf-8")
    rows = re.findall(
        r"^\| (`\[.+?) \|.*\[[^\]]+\]\(([^)\s]+)\) \|$", text, re.MULTILINE
    )
    for names, link in rows:
        name, _, anchor = link.rpartition("/")[2].partition("#")
        folder = ROOT if "://" in link else ROOT / "docs"
        yield re.findall(r"\[(\w+)\]", names), folder / name, anchor


def test_tools_of_the_site_have_upper_bounds():
    """A new major version would end builds of the site, whose warnings are errors."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    tools = project["optional-dependencies"]["docs"]
    assert not [x for x in tools if not x.startswith("jaxmem[") and "<" not in x]


def test_extras_are_on_the_pages_that_describe_them():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    described = [*_described_extras()]
    names = [name for names, *_ in described for name in names]
    assert sorted(names) == sorted(project["optional-dependencies"])
    for names, page, anchor in described:
        text = _section(page.read_text("utf-8"), anchor)
        for name in names:
            assert f"[{name}]" in text, f"{page.name} does not name the extra {name}"


def test_schemes_of_data_are_on_the_page_that_describes_them():
    source = (ROOT / "jaxmem" / "data" / "remote.py").read_text("utf-8")
    schemes = {*re.findall(r"\b(\w+://)", source)}
    assert schemes >= {"hf://", "gs://", "s3://"}
    ((_, page, anchor),) = [x for x in _described_extras() if "remote" in x[0]]
    text = _section(page.read_text("utf-8"), anchor)
    assert not [scheme for scheme in schemes if scheme not in text]


@pytest.mark.parametrize("section", sorted(configuration.sections()))
def test_keys_are_on_the_pages_that_describe_their_section(section):
    """All keys, but of `model` those alone that no checkpoint sets."""
    config = ROOT / "docs" / "reference" / "config.md"
    about = _section(config.read_text("utf-8"), section)
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", about)
    assert about.split("\n")[2].startswith("Explained in [") and links
    texts = [(config.parent / link).resolve().read_text("utf-8") for link in links]
    fields = [x.name for x in dataclasses.fields(configuration.sections()[section])]
    chosen = [x for x in fields if section != "model" or x in config_writer.FREE]
    keys = [f"{section}.{name}" for name in chosen]
    missing = [
        key for key in keys if not any(re.search(rf"\b{key}\b", x) for x in texts)
    ]
    assert not missing, f"name them on one of {links}"


def _literals():
    """The strings of the package's code, where formatted values are left out."""
    for path in sorted((ROOT / "jaxmem").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    v.value if isinstance(v, ast.Constant) else "{}"
                    for v in node.values
                )
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_of_the_troubleshooting_page_exist():
    text = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    headings = re.findall(r"^### (`.+)$", text, re.MULTILINE)
    assert len(headings) > 20
    written = "\n".join(_literals())
    missing = [
        part
        for heading in headings
        for part in re.findall(r"`([^`]+)`", heading)
        if part not in written and part not in ELSEWHERE
    ]
    assert not missing


# Of the operating system, jax and NCCL.
ELSEWHERE = {
    "No space left on device", "forward-mode autodiff", "ncclGetPeerDevicePointer",
    # Made of parts for tokens and pairs; test_token_independence checks them whole.
    "loss_fn must take any number of tokens",
    "loss_fn must compute a token's loss and metrics from that token's values only",
}  # fmt: skip


# ------------------------------------------------- these checks catch what they must


def test_wrong_block_is_caught():
    shared = "```python\nx = 1\n```\n\n```python\n>>> x + 1\n2\n>>> y = 3\n```\n"
    assert run_python(shared + "```python\nassert y == 3\n```\n", "doc")["x"] == 1
    with pytest.raises(ZeroDivisionError) as caught:
        run_python("# Title\n\n```python\n1 / 0\n```\n", "doc")
    assert caught.traceback[-1].lineno == 3  # from 0
    with pytest.raises(AssertionError, match="Got"):
        run_python("```python\n>>> 1 + 1\n3\n```\n", "doc")
    with pytest.raises(AssertionError, match="open block"):
        blocks("```python\nx = 1\n")


def test_commands_are_found():
    text = (
        "```console\n$ pip install -e '.[test]' && A=1 jaxmem train \\\n  x.gin a.b=1\n"
        "output jaxmem\n```\n```bash\npytest -q | tail  # comment\n```\n"
        "```\njaxmem no command\n```\n"
    )
    assert [*commands(text)] == [
        ["pip", "install", "-e", ".[test]"],
        ["jaxmem", "train", "x.gin", "a.b=1"],
        ["pytest", "-q"],
        ["tail"],
    ]


@pytest.mark.parametrize(
    "command",
    [
        "jaxmem trian configs/sft_stdlib.gin",
        "jaxmem train configs/no_such_file.gin",
        "jaxmem train configs/sft_stdlib.gin run.no_such_key=1",
        "python -m jaxmem train",
        "pip install 'jaxmem[no_such_extra]'",
        "pytest tests/no_such_test.py",
    ],
)
def test_wrong_command_is_caught(command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises((AssertionError, ValueError)):
        for words in commands(f"```bash\n{command}\n```\n"):
            check_command(words)


@pytest.mark.parametrize(
    "block",
    [
        "bash\njaxmem train sft_lora.gin model.checkpoint=DIR " + 30 * "x",
        "console\n$ jaxmem train \\\n    " + 70 * "x",
        "text\njaxmem train sft_lora.gin " + 60 * "x",
        "bash\njaxmem train configs/sft_lora.gin",
    ],
)
def test_command_that_is_cut_is_caught(block):
    check_command_lines(
        f"```text\n{80 * 'x'}\n```\n```console\n$ ls\n{80 * 'x'}\n```\n"
    )
    with pytest.raises(AssertionError, match="72 columns|without configs/"):
        check_command_lines(f"```{block}\n```\n")


RECORDS = [
    {"path": "jaxmem", "tokens": "8192", "seconds": "1.2345", "mib": "12.06"},
    {"path": "dense", "tokens": "8192", "seconds": "1.31", "mib": "1024"},
    {"path": "jaxmem", "tokens": "64", "seconds": "2.5e-05", "mib": "0.5"},
]


@pytest.mark.parametrize(
    ("columns", "table", "complaint"),
    [
        (
            ": seconds, mib",
            "| | tokens | s | MiB |\n|-|-|-|-|\n| ours | 8,192 | 1.23 | **12.1** |",
            None,
        ),
        (
            ": seconds mib",
            "| path | tokens | a |\n|-|-|-|\n| `dense` | 8192 | 1.3 and 1,024 MiB |",
            None,
        ),
        (": seconds", "| 2 | a |\n|-|-|\n| 7 layers | bf16, 2.5e-05 s |", None),
        (": seconds, mib", "| | b | b |\n|-|-|-|\n| ours | 1.23 | 12.06 |", None),
        (": -", "| | remark |\n|-|-|\n| ours | the fastest |", None),
        ("", "| path | tokens |\n|-|-|\n| dense | 8192 |", None),
        (": seconds", "| | s |\n|-|-|\n| ours | 1.24 |", "[('seconds', '1.24')]"),
        (": seconds", "| tokens | s |\n|-|-|\n| 64 | 1.31 |", "('seconds', '1.31')"),
        (": seconds", "| tokens | s |\n|-|-|\n| 65 | 1.31 |", "no record has {'tok"),
        # Of another column, of two records, of the first of two columns of one name.
        (": seconds", "| | s |\n|-|-|\n| ours | 12.06 |", "('seconds', '12.06')"),
        (": seconds, mib", "| | a | b |\n|-|-|-|\n| x | 1.23 | 1024 |", "'1024')]"),
        (": seconds, mib", "| | b | b |\n|-|-|-|\n| x | 9 | 12.06 |", "('seconds', '9"),
        (": seconds", "| | s |\n|-|-|\n| x | 1.2345x faster, 9× |", "a number of each"),
        (": -", "| | remark |\n|-|-|\n| ours | 9 times |", "no column is named"),
        (": second", "| | s |\n|-|-|\n| ours | 1.23 |", "no columns ['second']"),
        ("", "| | s |\n|-|-|\n| ours | 1.23 |", "name the CSV's columns of ['s']"),
        ("", "No table.", "no table below"),
    ],
)
def test_wrong_number_is_caught(columns, table, complaint):
    source = f"<!-- from benchmarks/results/x.csv{columns} -->"
    text = f"Words.\n\n{source}\n\n{table}\n\nMore.\n"

    def check():
        for found in tables(text):
            assert found.source == "benchmarks/results/x.csv"
            check_table(found, RECORDS)

    if complaint is None:
        check()
    else:
        with pytest.raises(AssertionError, match=re.escape(complaint)):
            check()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("| x | 1.23 s <!-- x.csv path=jaxmem tokens=8192: seconds --> |", None),
        ("For 8 tokens\n1.3 s and 1,024 <!-- x.csv path=dense: seconds mib -->", None),
        ("| 1.3 | fast <!-- x.csv path=dense: seconds --> |", "no number before"),
        ("1.3 s\n\nIt <!-- x.csv path=dense: seconds -->", "no number before"),
        ("12.06 s <!-- x.csv path=jaxmem: seconds -->", "('seconds', '12.06')"),
        ("1.23 s, 0.5 <!-- x.csv path=jaxmem: seconds mib -->", "'0.5')]"),
        ("1.3 s <!-- x.csv path=eager: seconds -->", "no record has {'path'"),
        ("1.3 s <!-- x.csv paths=dense: seconds -->", "no columns ['paths']"),
        ("1.3 s <!-- x.csv: seconds -->", "expected <!--"),
    ],
)
def test_wrong_number_in_a_sentence_is_caught(text, complaint):
    if complaint is None:
        (quote,) = quotes(text)
        check_quote(quote, RECORDS)
    else:
        with pytest.raises(AssertionError, match=re.escape(complaint)):
            for quote in quotes(text):
                check_quote(quote, RECORDS)


@pytest.mark.parametrize("link", ["[x](nowhere.md)", "![x](a.png)", "[x](#else)"])
def test_wrong_link_is_caught(link):
    document = ROOT / "docs" / "index.md"
    text = "# The title, of `it`\n\n[here](#the-title-of-it) [up](../README.md)\n"
    check_links(document, f"{text}```text\n[x](y)\n```\n")
    with pytest.raises(AssertionError, match="does not exist|no such heading"):
        check_links(document, text + link)


def test_mistyped_source_is_caught():
    with pytest.raises(AssertionError, match="expected"):
        list(tables("<!-- from: x.csv -->\n| a |\n|-|\n| 1 |\n"))
