"""Folders with splits, data sets of `save_to_disk`, tables of text and packed files."""

import dataclasses
import json
import re

import pytest

from jaxmem.data import documents, pairs, prompts, source_files, tasks, texts
from jaxmem.data.block_files import FileBlocks
from jaxmem.data.config import DataConfig
from jaxmem.data.record_reader import RecordReader
from jaxmem.data.records import DataError, read_records
from jaxmem.data.source_files import find_files, held_out_files, numbered_files

NOT_USED = "README.md", "extra.jsonl", "test.jsonl"


def lines(*values, key="text"):
    return "".join(json.dumps({key: value}) + "\n" for value in values)


@pytest.fixture
def folder(tmp_path):
    """A folder of two training files, a validation and a test file, and others."""
    folder = tmp_path / "set"
    (folder / ".cache").mkdir(parents=True)
    for name in (".cache/train.jsonl", *NOT_USED):
        (folder / name).write_text(lines("never"))
    (folder / "train-b.jsonl").write_text(lines("three"))
    (folder / "Train-a.jsonl").write_text(lines("one", "two"))
    (folder / "validation.jsonl").write_text(lines("four"))
    return folder


def names(source, held_out=False):
    files = numbered_files(str(source), "data.source", held_out)
    return [path.name for _, path in files]


def fields(path):
    return [record.fields for record in read_records(path, "data.source")]


def test_folder_is_read_by_its_splits(folder):
    assert names(folder) == ["Train-a.jsonl", "train-b.jsonl"]
    assert names(folder, held_out=True) == ["validation.jsonl"]
    config = DataConfig(source=str(folder))
    assert source_files.lines(config, "data") == [
        f"data.source: {folder}: 2 files, Train-a.jsonl to train-b.jsonl to train on; "
        "validation.jsonl held out; not used: 'README.md', 'extra.jsonl', 'test.jsonl'"
    ]
    fraction = dataclasses.replace(config, held_out=0.4)
    (line,) = source_files.lines(fraction, "data")
    assert "validation.jsonl held out instead of data.held_out=0.4; not used" in line


def test_documents_of_held_out_files_are_held_out(folder, tmp_path):
    (tmp_path / "more.jsonl").write_text(lines("five"))
    source = str(tmp_path / "more.jsonl"), str(folder)
    reader = RecordReader()
    training, evaluation = texts.load_splits(source, 0.0, reader)
    assert [d.text for d in training] == ["five", "one", "two", "three"]
    assert [d.source for d in training] == [0, 1, 1, 1]
    assert [d.text for d in evaluation] == ["four"]
    assert reader.lines() == ["read as texts, 5 records"]
    assert texts.load_splits(source, 0.25) == (training, evaluation)


@pytest.mark.parametrize("fraction", [0.0, 0.5])
@pytest.mark.parametrize("streaming", [False, True])
def test_batches_of_held_out_files(streaming, fraction, folder, tmp_path):
    config = DataConfig(
        source=str(folder), vocab_size=260, sequence_length=16, batch_size=1,
        streaming=streaming, held_out=fraction, cache_dir=str(tmp_path),
    )  # fmt: skip
    tokenizer = documents.load_tokenizer(config)
    read = {
        split: "".join(
            tokenizer.decode(batch.tokens[0].tolist())
            for batch in documents.batches(config, tokenizer, split=split, epochs=1)
        )
        for split in ("train", "evaluation")
    }
    assert read["evaluation"] == "four"
    assert sorted(re.findall("one|two|three|four", read["train"])) == [
        "one", "three", "two"
    ]  # fmt: skip


def test_pairs_and_prompts_of_held_out_files(folder, tmp_path):
    config = DataConfig(source=str(folder), vocab_size=260, cache_dir=str(tmp_path))
    tokenizer = documents.load_tokenizer(config)
    task = tasks.TaskConfig(source=str(folder), columns={"prompt": "text"})
    training, evaluation = prompts.load_prompts(
        task, (tokenizer, RecordReader(None, task.columns))
    )
    assert [p.prompt for p in training] == ["one", "two", "three"]
    assert [p.prompt for p in evaluation] == ["four"]
    for path in folder.glob("[tTv]*.jsonl"):
        texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
        rows = [{"chosen": text, "rejected": "no"} for text in texts]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    training, evaluation = pairs.load_pairs(config, tokenizer)
    assert len(training) == 3 and len(evaluation) == 1
    assert evaluation[0].where.endswith("validation.jsonl:1")


def test_files_that_name_no_split_are_trained_on(tmp_path):
    for name in ("b.jsonl", "testimonials.jsonl", "a/c.csv", "dev/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(lines("x"))
    assert names(tmp_path) == ["c.csv", "b.jsonl", "testimonials.jsonl"]
    assert names(tmp_path, held_out=True) == ["d.jsonl"]


def test_subfolders_name_splits(tmp_path):
    for name in ("data/train-0.parquet", "data/test-0.parquet", "train/0.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert names(tmp_path) == ["train-0.parquet", "0.jsonl"]
    assert names(tmp_path, held_out=True) == ["test-0.parquet"]


def test_unusable_folder_is_listed(tmp_path):
    with pytest.raises(DataError, match="no file to train on: it is empty"):
        names(tmp_path)
    for name in ("a.png", "test.jsonl"):
        (tmp_path / name).touch()
    said = r"^data.source: the folder .* it has 'a.png', 'test.jsonl'; training files"
    with pytest.raises(DataError, match=said):
        names(tmp_path)
    with pytest.raises(DataError, match="^--in: .* is a folder; name a file, or files"):
        find_files(str(tmp_path), "--in")
    assert not held_out_files(str(tmp_path / "absent"), "data.source")


# --------------------------------------------------------- data sets that were saved


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A data set of 2,500 rows in two files, and one of three splits."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    where = tmp_path_factory.mktemp("saved")
    rows = [{"messages": [{"role": "user", "content": f"{i}"}]} for i in range(2500)]
    whole = datasets.Dataset.from_list(rows)
    whole.save_to_disk(where / "whole", num_shards=2)
    few = whole.select(range(3))
    splits = {"train": few, "validation": whole.select([7]), "spare": few}
    datasets.DatasetDict(splits).save_to_disk(where / "splits")
    return where


def test_saved_data_set_is_read_in_order(saved):
    assert names(saved / "whole") == [
        "data-00000-of-00002.arrow", "data-00001-of-00002.arrow"
    ]  # fmt: skip
    paths = [path for _, path in numbered_files(str(saved / "whole"), "data.source")]
    rows = [row for path in paths for row in fields(path)]
    assert [int(row["messages"][0]["content"]) for row in rows] == [*range(2500)]
    *_, last = read_records(paths[1], "data.source")
    assert last.where == f"{paths[1]}: row 1250"


def test_saved_splits_are_held_out(saved):
    source = str(saved / "splits")
    training, held_out = (
        [
            row["messages"][0]["content"]
            for _, path in numbered_files(source, "data.source", held_out=part)
            for row in fields(path)
        ]
        for part in (False, True)
    )
    assert training == ["0", "1", "2"] and held_out == ["7"]
    (line,) = source_files.lines(DataConfig(source=source), "data")
    assert "train/data-00000-of-00001.arrow to train on; validation/data-" in line
    assert line.endswith("not used: 'spare'")


def test_saved_data_set_streams_by_rows(saved):
    blocks = FileBlocks(str(saved / "whole"), "data.source")
    counts = [len(list(blocks.records(i))) for i in range(len(blocks))]
    assert counts == [1000, 250, 1000, 250]
    assert next(blocks.records(1)).where.endswith("00000-of-00002.arrow: row 1001")


def test_damaged_data_set_is_named(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "a.arrow").write_text("no table")
    with pytest.raises(DataError, match=r"data.source: cannot read .*a\.arrow: "):
        list(read_records(tmp_path / "a.arrow", "data.source"))
    (tmp_path / "state.json").write_text('{"_indices_data_files": [{}]}')
    with pytest.raises(
        DataError, match="was saved by an old version of datasets; load the"
    ):
        names(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["a", "b"]}')
    with pytest.raises(
        DataError, match="has the splits 'a', 'b' but no split train; name"
    ):
        names(tmp_path)


# ------------------------------------------------------------------- tables of text


def test_cells_of_tables_are_text(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('\ufeffprompt,answer\n"a, ""b""\nc",4\n\nd,\n')
    records = list(read_records(path, "data.source"))
    assert [r.fields for r in records] == [
        {"prompt": 'a, "b"\nc', "answer": "4"}, {"prompt": "d", "answer": None}
    ]  # fmt: skip
    assert [r.where for r in records] == [f"{path}:2", f"{path}:5"]
    (tmp_path / "a.tsv").write_text("prompt\tanswer\r\na, b\t4\r\n")
    assert fields(tmp_path / "a.tsv") == [{"prompt": "a, b", "answer": "4"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "a,b\n1,2\n1,2,3\n",
            r"a\.csv:3: the row has 3 cells, but the header has 2; put",
        ),
        ("a,b\n1\n", r"a\.csv:2: the row has 1 cells, but the header has 2"),
        ('a\n"x" y\n', r"a\.csv:2: ',' expected after '\"'"),
        ('a\n1\n"x\n', r"a\.csv:3: unexpected end of data"),
        ("a,a\n1,2\n", r"a\.csv:1: the first row must name the columns, .* 'a', 'a'"),
        ("a,\n1,2\n", r"a\.csv:1: the first row must name the columns"),
        (b"a\n1\n\xff\n", r"a\.csv:3: not UTF-8 text \(byte 0 of the line\)"),
    ],
)
def test_row_that_cannot_be_read_is_named(content, message, tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        list(read_records(path, "data.source"))


# --------------------------------------------------------------------- packed files


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".txt"])
def test_zstandard_files_hold_what_others_hold(suffix, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    content = {".csv": "text\na\nb\n", ".txt": "a\n\nb"}.get(suffix, lines("a", "b"))
    path = tmp_path / f"a{suffix}.zst"
    halves = [pyarrow.compress(content.encode(), "zstd", asbytes=True)]
    path.write_bytes(b"".join(halves))
    found = documents.load_documents(str(path))
    assert [d.text for d in found] == ["a", "b"]


def test_cut_zstandard_file_is_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    packed = pyarrow.compress(lines(*"abc").encode(), "zstd", asbytes=True)
    path = tmp_path / "a.jsonl.zst"
    for content in (packed[:-4], b"no frame"):
        path.write_bytes(content)
        with pytest.raises(
            DataError, match=r"data.source: cannot read .*a\.jsonl\.zst"
        ):
            documents.load_documents(str(path))
    path.write_bytes(packed + packed)  # frames one after the other
    assert len(documents.load_documents(str(path))) == 6


def test_missing_library_of_a_format_is_named(tmp_path, monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("importlib.import_module", absent)
    (tmp_path / "a.jsonl.zst").touch()
    (tmp_path / "a.arrow").touch()
    for name, library, extra in (
        ("a.jsonl.zst", "pyarrow", "score"),
        ("a.arrow", "datasets", "remote"),
    ):
        said = rf"{re.escape(name)} needs {library}, which is .* pip .*\[{extra}\]"
        with pytest.raises(DataError, match=said):
            list(read_records(tmp_path / name, "data.source"))
