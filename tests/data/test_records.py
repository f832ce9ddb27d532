"""Several files, globs, Parquet and paragraphs."""

import gzip
import json
import tracemalloc

import pytest

from jaxmem.base import messages
from jaxmem.data import documents
from jaxmem.data.record_reader import RecordReader

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = [
    {"prompt": "2+2=", "completion": "4"},
    {"prompt": "é", "completion": "\u2028"},
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ':' + m.content }}"
    "{% if m.name is defined %}{{ m.name }}{% endif %};{% endfor %}"
)


def write(path, rows):
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_parquet_holds_what_jsonl_holds(tmp_path):
    made = documents.load_documents(write(tmp_path / "a.parquet", ROWS))
    lines = documents.load_documents(write(tmp_path / "a.jsonl", ROWS))
    assert [d[1:] for d in made] == [d[1:] for d in lines]
    assert made[0][1:3] == ("4", "2+2=")
    assert made[1].name.endswith("a.parquet: row 2")


def test_parquet_message_omits_absent_columns(tmp_path):
    pytest.importorskip("jinja2")
    from jaxmem.data import chat

    rows = [
        {"messages": [{"role": "user", "content": "a", "name": "n"},
                      {"role": "assistant", "content": "b"}]},
    ]  # fmt: skip
    template = chat.ChatTemplate(TEMPLATE, {}, "")
    for name in ("a.parquet", "a.jsonl"):
        source = write(tmp_path / name, rows)
        (made,) = documents.load_documents(
            source, reader=RecordReader(lambda: template)
        )
        assert made.text == "user:an;assistant:b;"


def test_several_files_and_globs_in_a_fixed_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.parquet"):
        write(tmp_path / name, [{"text": name}])
    (tmp_path / "[x].txt").write_text("bracket")
    several = str(tmp_path / "c.parquet"), str(tmp_path / "*.jsonl")
    texts = [d.text for d in documents.load_documents(several)]
    assert texts == ["c.parquet", "a.jsonl", "b.jsonl"]
    assert documents.load_documents(str(tmp_path / "[x].txt"))[0].text == "bracket"
    with pytest.raises(
        documents.DataError, match=r"data.source: .*/z\*.jsonl matches no"
    ):
        documents.load_documents(str(tmp_path / "z*.jsonl"))
    with pytest.raises(documents.DataError, match="data.source is empty; name a file"):
        documents.load_documents(())


def test_damaged_parquet_file_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no PAR1")
    with pytest.raises(
        documents.DataError, match=r"data.source: cannot read .*a\.parquet: "
    ):
        documents.load_documents(str(tmp_path / "a.parquet"))
    with pytest.raises(documents.DataError, match=r"b\.parquet: No such file"):
        documents.load_documents(str(tmp_path / "b.parquet"))


def test_conversations_in_two_columns(tmp_path):
    pytest.importorskip("jinja2")
    from jaxmem.data.chat import ChatTemplate

    row = {
        "prompt": [{"role": "assistant", "content": "x"}],
        "completion": [{"role": "assistant", "content": "yz"}],
    }
    source = write(tmp_path / "a.jsonl", [row])
    template = ChatTemplate(TEMPLATE, {}, "")
    (made,) = documents.load_documents(source, reader=RecordReader(lambda: template))
    assert [made.text[a:b] for a, b in made.counted] == ["yz"]


# --------------------------------------------------------------------- bounds


@pytest.mark.parametrize("packed", [False, True])
def test_line_without_end_is_not_read_whole(packed, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxmem.base.json_files.MAX_BYTES", 2**11)
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    content = b'{"text": "a"}\n' + b"\0" * 2**25
    path.write_bytes(gzip.compress(content, 1) if packed else content)
    del content
    tracemalloc.start()
    try:
        with pytest.raises(documents.DataError, match=r":2: a line longer than 0 MiB"):
            documents.load_documents(str(path))
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.json"])
def test_file_that_is_read_whole_has_a_bound(name, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxmem.data.records._MOST_BYTES", 2**12)
    content = b"[" + b" " * 2**13
    (tmp_path / name).write_bytes(
        gzip.compress(content) if name.endswith(".gz") else content
    )
    with pytest.raises(documents.DataError, match=rf"{name} has more than 0 GiB of te"):
        documents.load_documents(str(tmp_path / name))


def test_columns_and_notes_are_cut(tmp_path):
    wide = {"text": "a", **{f"column {i}": 1 for i in range(20_000)}}
    rows = [wide, *({"text": "a", f"other {i}": 1} for i in range(100))]
    reader = RecordReader()
    documents.load_documents(write(tmp_path / "a.jsonl", rows), reader=reader)
    lines = reader.lines()
    assert len(lines) < 40
    assert f"19,990 other columns are not used: 1 (first {tmp_path}/a.jsonl:1)" in lines
    assert lines[-1].endswith("more notes of this kind")


@pytest.mark.parametrize("suffix", ["jsonl", "txt", "parquet"])
def test_file_that_memory_cannot_hold_is_named(suffix, tmp_path, monkeypatch):
    path = tmp_path / f"a.{suffix}"
    if suffix == "txt":
        path.write_text("a")
    else:
        write(path, [{"text": "a"}])

    def full(*_):
        raise MemoryError

    monkeypatch.setattr("jaxmem.data.texts._paragraphs", full)
    monkeypatch.setattr(RecordReader, "document", full)
    with pytest.raises(documents.DataError) as raised:
        documents.load_documents(str(path))
    assert str(raised.value) == (
        f"data.source: the host's memory cannot hold {messages.name(str(path))}; name "
        "files of fewer records, or read .jsonl, .parquet and .arrow files by "
        "data.streaming=True"
    )
