"""Conversations as transformers renders them, or refused where a field would be lost.

    python -m tests.data.test_renderings TEMPLATES RECORDED.json

does the same with templates that are not carried here, of which `make_renderings` has
recorded the renderings.
"""

import datetime
import json
import pathlib
import re
import sys
from collections import Counter

import pytest

from jaxmem.data.chat import ChatTemplate
from jaxmem.data.record_reader import RecordReader
from jaxmem.data.records import DataError, RawRecord
from tests.data import make_renderings
from tests.data.make_renderings import CASES, HERE, TODAY, TOKENS

RECORDED = json.loads((HERE / "renderings.json").read_text("utf-8"))
# What a template has made of a form that it does not take.
MANGLED = re.compile(r"\[?{'|\\\"|\bNone\b")
REASONING = ("reasoning_content", "thinking")


def leaves(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from (key, *leaves(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield str(value)


def said(case):
    """Everything that a conversation says, but for the reasoning of earlier turns."""
    *_, last = case["messages"]
    for turn in case["messages"]:
        content = turn["content"]
        parts = content if isinstance(content, list) else [{"text": content or ""}]
        yield from (part["text"].strip() for part in parts)
        for called in turn.get("tool_calls", ()):
            yield from (
                called["function"]["name"],
                *leaves(called["function"]["arguments"]),
            )
        yield from (turn[key] for key in REASONING if key in turn and turn is last)
    yield from (tool["function"]["description"] for tool in case.get("tools", ()))


def is_whole(text, case):
    return not MANGLED.search(text) and all(part in text for part in said(case))


def rendered(template, case, name):
    """The text, and what is said of all records."""
    day = datetime.datetime(*TODAY)
    made = ChatTemplate(template, TOKENS, name, ["</s>"], today=day)
    reader = RecordReader(lambda: made, stripped="count")
    return reader.document(RawRecord(f"{name}.jsonl:1", case)).text, reader.lines()


def check(template, recorded, case, name):
    """The result of a case, "equal" or "refused"; raises for any other."""
    texts = [text for text in recorded.values() if isinstance(text, str)]
    whole = [text for text in texts if is_whole(text, case)]
    try:
        text, lines = rendered(template, case, name)
    except DataError as error:
        said_why = str(error)
        assert said_why.startswith(f"{name}.jsonl:1: ") and "\n" not in said_why
        assert not whole, f"{said_why}\n{whole[0]}"
        return "refused"
    if any("leaves out text of" in line for line in lines):
        assert text in texts and not MANGLED.search(text), text
        return "equal"
    assert text in whole, text
    return "equal"


@pytest.mark.parametrize("name", RECORDED)
def test_renderings_are_transformers(name):
    template = (HERE / "templates" / f"{name}.jinja").read_text("utf-8")
    found = Counter(
        check(template, RECORDED[name]["cases"][case], CASES[case], name)
        for case in CASES
    )
    assert found["equal"] >= 4


def test_every_case_is_rendered_by_some_template():
    for case in CASES:
        forms = (RECORDED[name]["cases"][case].values() for name in RECORDED)
        texts = [text for of in forms for text in of if isinstance(text, str)]
        assert any(is_whole(text, CASES[case]) for text in texts), case


def test_recorded_templates_are_present():
    names = {path.stem for path in (HERE / "templates").glob("*.jinja")}
    assert names == RECORDED.keys()
    for name in names:
        content = (HERE / "templates" / f"{name}.jinja").read_bytes()
        digest = make_renderings.hashlib.sha256(content).hexdigest()
        assert digest == RECORDED[name]["sha256"], f"make renderings.json again: {name}"


def main(directory, path):
    """Compare others, and print what became of each."""
    recorded, failed = json.loads(pathlib.Path(path).read_text("utf-8")), 0
    for name, of in recorded.items():
        template = (pathlib.Path(directory) / f"{name}.jinja").read_text("utf-8")
        found = Counter()
        for case, texts in of["cases"].items():
            try:
                found[check(template, texts, CASES[case], name)] += 1
            except (AssertionError, DataError) as error:
                failed += 1
                found["different"] += 1
                print(f"{name}, {case}: {str(error)[:2000]}")
        print(name, dict(found))
    return failed


if __name__ == "__main__":
    sys.exit(min(main(*sys.argv[1:]), 1))
