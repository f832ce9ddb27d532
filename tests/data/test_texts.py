"""Documents out of files, whatever lines these have: the right ones, or an error."""

import json

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxmem.data.documents import DataError, load_documents
from tests.helpers import nasty

GOOD = [{"text": "a b"}, {"prompt": "é", "response": "\u2028", "id": 7}]
lines = nasty.objects(GOOD, ["text", "meta"], st.sampled_from(["b", "", "😀"]))


@pytest.mark.full
@nasty.profile(250)
@hypothesis.given(
    content=st.lists(nasty.files(lines) | st.just(b""), min_size=1, max_size=3)
)
def test_lines_of_a_jsonl_file(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(b"\n".join(content))
    loaded, documents = nasty.outcome(lambda: load_documents(str(path)), str(path))
    if not loaded:
        return
    records = [
        {k: v for k, v in json.loads(line).items() if v is not None}
        for line in path.read_bytes().decode("utf-8-sig").split("\n")
        if line.strip()
    ]
    assert [d.text for d in documents] == [
        record.get("text", record.get("response")) for record in records
    ]
    assert [d.prompt for d in documents] == [r.get("prompt", "") for r in records]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1" * 5000, "an integer of 5,000 digits is too large"),
        ('{"text": "a", "id": ' + "1" * 5000 + "}", "an integer of 5,000 digits is"),
        ("[" * 100_000, "nested deeper than 100"),
        ('{"text": "a", "meta": NaN}', "NaN is not JSON; write null, or leave"),
        ('{"text": "a", "score": 1e999}', "the number 1e999 is too large"),
        ('{"text": "a", "text": "b"}', "the key 'text' is there twice"),
        (r'{"text": "a", "meta": ["\udc00"]}', "holds half of a surrogate pair"),
        ('{"' + "k" * 10_000 + '": 1}', "got the keys 'kkk"),
    ],
)
def test_line_beyond_limit_has_short_error(line, message, tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError) as raised:
        load_documents(str(path))
    assert str(raised.value).startswith(f"{path}:2: ") and message in str(raised.value)
    assert len(str(raised.value)) < 300 + len(str(path))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\0.txt", "cannot read 'a\\x00.txt': embedded null byte"),
        ("x" * 5000 + ".jsonl", "File name too long"),
        ("~nobody-of-that-name/a.txt", "cannot read ~nobody-of-that-name/a.txt: No su"),
        ("a" * 5000, 'data.source must be "stdlib", a folder, or the path of a .jsonl'),
        ("trl-lib/Capybara", "; a data set of the Hub is hf://trl-lib/Capybara"),
    ],
)
def test_names_that_no_file_can_have(source, message):
    with pytest.raises(DataError) as raised:
        load_documents(source)
    assert message in str(raised.value) and len(str(raised.value)) < 400


def test_directory_of_a_glob_is_no_file(tmp_path):
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(DataError, match=r"data.source: .*a\.jsonl is not a file"):
        load_documents(str(tmp_path / "*.jsonl"))
