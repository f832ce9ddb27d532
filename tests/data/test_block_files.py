"""Streamed data: every record once, a bounded part of it held, resumed anywhere."""

import collections
import dataclasses
import itertools
import json
import os
import shutil
import tracemalloc
import weakref

import numpy as np
import pytest

from jaxmem.data import block_files, documents, packed
from jaxmem.data.block_files import FileBlocks

WINDOW = 12


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of some lines, and rows that are packed few at a time."""
    monkeypatch.setattr(block_files, "BLOCK_BYTES", 100)
    monkeypatch.setattr(packed, "ROWS_OPEN", 4)


def write(path, count, seed=0):
    """Texts of one to thirty words, each with a number of its own."""
    rng = np.random.default_rng(seed)
    texts = [f"{i} " + "tile " * int(rng.integers(1, 30)) for i in range(count)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    lines[3] += "\n"  # blank lines hold nothing
    path.write_text("".join(lines))
    return texts


@pytest.fixture
def config(tmp_path):
    write(tmp_path / "a.jsonl", 30)
    write(tmp_path / "b.jsonl", 15, seed=1)
    return documents.DataConfig(
        source=str(tmp_path / "*.jsonl"),
        vocab_size=275,
        sequence_length=16,
        batch_size=2,
        seed=3,
        cache_dir=str(tmp_path / "cache"),
        streaming=True,
        shuffle_window=WINDOW,
    )


def rows_of(batches):
    """Each document's part of each row, as (tokens, labels)."""
    for batch in batches:
        for tokens, labels, ids in zip(
            batch.tokens, batch.labels, batch.segment_ids, strict=True
        ):
            for i in range(1, ids.max() + 1):
                yield tuple(tokens[ids == i]), tuple(labels[ids == i])


@pytest.mark.parametrize("size", [1, 7, 100, 10**6])
def test_blocks_hold_records_once_in_order(size, tmp_path, monkeypatch):
    monkeypatch.setattr(block_files, "BLOCK_BYTES", size)
    texts = write(tmp_path / "a.jsonl", 20)
    every = FileBlocks(str(tmp_path / "a.jsonl"), "data.source")
    records = [r for i in range(len(every)) for r in every.records(i)]
    assert [record.fields["text"] for record in records] == texts
    assert (len(every) == 1) == (size == 10**6)


def test_parquet_is_read_by_row_groups(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    texts = [f"text {i}" for i in range(10)]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=4)
    write(tmp_path / "b.jsonl", 4)
    every = FileBlocks((str(path), str(tmp_path / "b.jsonl")), "data.source")
    assert [len(list(every.records(i))) for i in range(3)] == [4, 4, 2]
    assert [r.fields["text"] for r in every.records(1)] == texts[4:8]
    assert next(every.records(1)).where == f"{path}: row group 2, row 1"
    assert every[3] == (tmp_path / "b.jsonl", 0)


def test_streamed_epoch_equals_epoch_in_memory(config):
    tokenizer = documents.load_tokenizer(config)
    in_memory = dataclasses.replace(config, streaming=False)
    wanted = list(rows_of(documents.batches(in_memory, tokenizer, epochs=1)))
    streamed = list(rows_of(documents.batches(config, tokenizer, epochs=1)))
    assert collections.Counter(streamed) == collections.Counter(wanted)
    twice = list(rows_of(documents.batches(config, tokenizer, epochs=2)))
    assert collections.Counter(twice) == collections.Counter(wanted * 2)
    assert twice[: len(streamed)] != twice[len(streamed) :]  # a new order
    assert streamed == list(rows_of(documents.batches(config, tokenizer, epochs=1)))


def test_streamed_epochs_without_shuffling_keep_file_order(config):
    tokenizer = documents.load_tokenizer(config)
    config = dataclasses.replace(config, shuffle=False, shuffle_window=4096)
    in_memory = dataclasses.replace(config, streaming=False)
    wanted = list(rows_of(documents.batches(in_memory, tokenizer, epochs=2)))
    made = documents.batches(config, tokenizer, epochs=2)
    first = [next(made) for _ in range(9)]
    resumed = documents.batches(config, tokenizer, epochs=2)
    resumed.set_state(json.loads(json.dumps(made.get_state())))
    assert list(rows_of((*first, *resumed))) == wanted


def test_streams_without_shuffling_have_every_nth_block_in_order(config):
    tokenizer = documents.load_tokenizer(config)
    config = dataclasses.replace(
        config, shuffle=False, shuffle_window=4096, streams=2, held_out=0.2
    )
    every = FileBlocks(config.source, "data.source")
    numbers = [block_files.blocks_of_split(every, config, "train", i) for i in (0, 1)]
    whole = sorted(np.concatenate(numbers))
    assert [n.tolist() for n in numbers] == [whole[::2], whole[1::2]]
    texts = [r.fields["text"] for i in numbers[1] for r in every.records(i)]
    rows = rows_of(documents.batches(config, tokenizer, epochs=1, stream=1))
    ids = [i for tokens, _ in rows for i in tokens]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(texts)


def test_resumes_bitwise_from_every_point(config):
    tokenizer = documents.load_tokenizer(config)
    batches, states, seen = documents.batches(config, tokenizer, epochs=2), [], []
    while True:
        states.append(json.loads(json.dumps(batches.get_state())))
        try:
            seen.append(next(batches))
        except StopIteration:
            break
    assert len(seen) > 20
    for i in [*range(0, len(seen), 3), len(seen)]:
        resumed = documents.batches(config, tokenizer, epochs=2)
        resumed.set_state(states[i])
        for batch, wanted in zip(itertools.islice(resumed, 3), seen[i:], strict=False):
            for a, b in zip(batch, wanted, strict=True):
                np.testing.assert_array_equal(a, b)
    with pytest.raises(StopIteration):
        next(resumed)


@pytest.mark.parametrize("times", [1, 4])
def test_memory_independent_of_data_size(times, config, monkeypatch, tmp_path):
    tokenizer = documents.load_tokenizer(config)
    write(tmp_path / "a.jsonl", 30 * times)
    alive, most, cut = weakref.WeakSet(), [], documents._pieces

    class Tokens(np.ndarray):
        __hash__ = object.__hash__  # for the set of weak references

    def pieces(*arguments):
        for source, piece in cut(*arguments):
            piece["tokens"] = piece["tokens"].view(Tokens)
            alive.add(piece["tokens"])
            most.append(len(alive))
            yield source, piece

    monkeypatch.setattr(documents, "_pieces", pieces)
    for batch in documents.batches(config, tokenizer, epochs=1):
        del batch
        most.append(len(alive))
    # A window, and the pieces of a block or those in rows that are being packed.
    assert (
        len(most) > 40 * times
        and print(max(most)) is None
        and max(most) <= WINDOW + 10 + 4 * 4
    )


def test_blocks_are_held_out_whole(config):
    config = dataclasses.replace(config, held_out=0.25)
    tokenizer = documents.load_tokenizer(config)
    parts = [
        collections.Counter(
            rows_of(documents.batches(config, tokenizer, split=split, epochs=1))
        )
        for split in ("train", "evaluation")
    ]
    every = dataclasses.replace(config, held_out=0.0)
    whole = collections.Counter(rows_of(documents.batches(every, tokenizer, epochs=1)))
    assert parts[0] + parts[1] == whole
    assert 0.1 < parts[1].total() / whole.total() < 0.4
    few = dataclasses.replace(config, held_out=0.01)  # at least one block
    assert len(list(documents.batches(few, tokenizer, split="evaluation", epochs=1)))


def test_streams_share_the_blocks(config):
    tokenizer = documents.load_tokenizer(config)
    halves = dataclasses.replace(config, streams=2)
    parts = [
        collections.Counter(
            rows_of(documents.batches(halves, tokenizer, stream=i, epochs=1))
        )
        for i in (0, 1)
    ]
    whole = rows_of(documents.batches(config, tokenizer, epochs=1))
    assert parts[0] + parts[1] == collections.Counter(whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(source="stdlib"),
            "data.source='stdlib' fits in memory: leave out data.stream",
        ),
        (dict(source="a.txt"), "data.streaming reads .jsonl, .parquet and .arrow f"),
        (dict(source="no.jsonl"), "data.source: cannot read no.jsonl: No such file"),
        (dict(source="empty.jsonl"), "data.source: empty.jsonl contains no text"),
        (dict(source="bad.jsonl"), "bad.jsonl: line at byte 14: "),
        (dict(source="bytes.jsonl"), "bytes.jsonl: line at byte 0: not UTF-8"),
    ],
)
def test_unstreamable_data_are_named(changes, message, config, tmp_path, monkeypatch):
    tokenizer = documents.load_tokenizer(config)
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "a.txt": b"a", "empty.jsonl": b"", "bad.jsonl": b'{"text": "a"}\n{"text"\n',
        "bytes.jsonl": b'{"text": "\xff"}\n',
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
    config = dataclasses.replace(config, **changes)
    with pytest.raises(documents.DataError) as raised:
        next(documents.batches(config, tokenizer))
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_other_files_or_settings_are_another_position(config, tmp_path):
    tokenizer = documents.load_tokenizer(config)
    state = documents.batches(config, tokenizer).get_state()
    other = dataclasses.replace(config, shuffle_window=WINDOW + 1)
    write(tmp_path / "b.jsonl", 16, seed=1)
    with pytest.raises(documents.DataError, match="b.jsonl is not the file of the sa"):
        documents.batches(config, tokenizer).set_state(state)
    state = documents.batches(config, tokenizer).get_state()
    with pytest.raises(documents.DataError, match="belongs to other data"):
        documents.batches(other, tokenizer).set_state(state)


def test_settings_before_streaming_are_unchanged(config):
    fixed = dataclasses.replace(config, streaming=False).fixed()
    assert not fixed.keys() & {"streaming", "shuffle_window", "cache_dir"}
    assert config.fixed()["shuffle_window"] == WINDOW


# ------------------------------------------------- files that change under a run


def replaced(path, seed=9):
    """Another file of the same name and size, whose text differs everywhere."""
    text = path.read_text()
    words = ["elit", "line"]
    other = path.with_suffix(".new")
    other.write_text(text.replace("tile", words[seed % 2]))
    assert other.stat().st_size == path.stat().st_size
    os.replace(other, path)


def dated(path):
    """Replace a file by another one that was written at the same time."""
    time = path.stat().st_mtime_ns
    replaced(path)
    os.utime(path, ns=(time, time))


CHANGES = {
    "cut": (lambda path: os.truncate(path, 0), r"it had [\d,]+ bytes and has 0; rest"),
    "longer": (lambda path: path.write_text(path.read_text() + " "), "bytes and has"),
    "replaced": (replaced, "it was replaced or rewritten; restore it and resume, or"),
    "replaced, with its time": (dated, "it was replaced or rewritten; restore it and"),
    "removed": (lambda path: path.unlink(), "cannot read .*b.jsonl: No such file"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_file_that_changes_while_it_is_read_is_named(change, config, tmp_path):
    tokenizer = documents.load_tokenizer(config)
    batches = documents.batches(config, tokenizer)
    next(batches)
    act, message = CHANGES[change]
    act(tmp_path / "b.jsonl")
    with pytest.raises(documents.DataError, match=message) as raised:
        for _ in range(200):
            next(batches)
    assert "b.jsonl" in str(raised.value) and "\n" not in str(raised.value)


def test_file_of_other_inode_is_read_on(config, tmp_path):
    tokenizer = documents.load_tokenizer(config)
    batches, alone = (documents.batches(config, tokenizer) for _ in range(2))
    path, copy = tmp_path / "b.jsonl", tmp_path / "copy"
    shutil.copy2(path, copy)
    os.replace(copy, path)
    for _ in range(60):
        np.testing.assert_array_equal(next(batches).tokens, next(alone).tokens)


def test_position_in_replaced_file_is_refused(config, tmp_path, monkeypatch):
    monkeypatch.setattr(block_files, "BLOCK_BYTES", 2**11)
    monkeypatch.setattr(block_files, "_SAMPLE_BYTES", 64)
    tokenizer = documents.load_tokenizer(config)
    path = tmp_path / "a.jsonl"
    write(path, 200)
    state = documents.batches(config, tokenizer).get_state()
    text = path.read_text()
    half = len(text) // 2
    path.write_text(text[:half] + text[half:].replace("tile", "elit"))
    with pytest.raises(documents.DataError, match="a.jsonl is not the file of the sa"):
        documents.batches(config, tokenizer).set_state(state)


def test_line_without_end_is_not_read_whole(config, tmp_path, monkeypatch):
    tokenizer = documents.load_tokenizer(config)
    monkeypatch.setattr("jaxmem.base.json_files.MAX_BYTES", 2**11)
    monkeypatch.setattr(block_files, "BLOCK_BYTES", 2**20)
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "a"}\n')
    os.truncate(path, 2**25)  # NULs, of which the disk has none
    batches = documents.batches(config, tokenizer)
    tracemalloc.start()
    try:
        with pytest.raises(documents.DataError, match=r"c.jsonl: line at byte 14: lon"):
            for _ in range(200):
                next(batches)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()
