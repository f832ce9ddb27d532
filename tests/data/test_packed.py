"""Epochs of packed rows: every piece once in each, whatever orders, deals or stops."""

import collections
import dataclasses
import itertools
import json

import numpy as np
import pytest

from jaxmem.data import documents, streams
from jaxmem.data.config import DataConfig
from jaxmem.data.records import DataError
from tests.helpers.cases import full, one_at_a_time

LENGTH = 32  # tokens of a row


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr("jaxmem.data.block_files.BLOCK_BYTES", 150)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of 60 and 9 documents, some of them longer than a row."""
    folder, rng = tmp_path_factory.mktemp("epochs"), np.random.default_rng(0)
    for letter, count in {"a": 60, "b": 9}.items():
        texts = [
            " ".join(f"{letter}{i}{j}" for j in range(rng.integers(1, 12)))
            for i in range(count)
        ]
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / f"{letter}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def config(folder):
    return DataConfig(
        (str(folder / "a.jsonl"), str(folder / "b.jsonl")), vocab_size=270,
        sequence_length=LENGTH, batch_size=4, cache_dir=str(folder), shuffle_window=16,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(config):
    return documents.load_tokenizer(config)


def pieces_of(config, tokenizer):
    """The tokens of each source's pieces; of those that occur once."""
    read, found = documents.load_documents(config.source), ([], [])
    for source, piece in documents._pieces(read, tokenizer, LENGTH):
        found[source].append(tuple(piece["tokens"].tolist()))
    counts = collections.Counter(found[0] + found[1])
    first, second = ([x for x in own if counts[x] == 1] for own in found)
    assert len(first) > 60 and len(second) > 8
    return first, second


def rows_of(batches):
    """The pieces of each row that is not padding."""
    for batch in batches:
        for tokens, segments in zip(batch.tokens, batch.segment_ids, strict=True):
            if count := int(segments.max()):
                yield [tuple(tokens[segments == i + 1].tolist()) for i in range(count)]


def check_passes(rows, pieces, at_least):
    """No piece comes again before all have come, and no row is of two epochs."""
    counts = dict.fromkeys(pieces, 0)
    assert len(counts) == len(pieces) > 0
    for row in rows:
        own = [piece for piece in row if piece in counts]
        assert len({counts[piece] for piece in own}) <= 1
        for piece in own:
            counts[piece] += 1
        assert max(counts.values()) - min(counts.values()) <= 1
    assert min(counts.values()) >= at_least


@pytest.mark.parametrize("parts, streaming", one_at_a_time([1, 2, 4], [False, True]))
def test_epochs_are_passes_over_all_pieces(streaming, parts, config, tokenizer):
    config = dataclasses.replace(config, streaming=streaming, streams=parts)
    made = streams.batches(config, tokenizer, range(4))
    first, second = (pieces_of(config, tokenizer)[source] for source in (0, 1))
    rows = rows_of(itertools.islice(made, 60))
    check_passes(rows, first + second, at_least=3)


@pytest.mark.parametrize("parts, streaming", one_at_a_time([1, 2], [False, True]))
def test_weighted_sources_are_passed_over_each(streaming, parts, config, tokenizer):
    config = dataclasses.replace(
        config, streaming=streaming, streams=parts, weights=(1.0, 1.0)
    )
    made = streams.batches(config, tokenizer, range(4))
    rows = list(rows_of(itertools.islice(made, 60)))
    first, second = pieces_of(config, tokenizer)
    check_passes(rows, first, at_least=1)
    check_passes(rows, second, at_least=5)
    share = np.mean([piece in {*first} for row in rows for piece in row])
    assert abs(share - 0.5) < (0.02 if parts == 1 else 0.05)


@pytest.mark.parametrize("streaming, weights, parts", [
    (False, None, 1), (True, None, 1), (False, (2.0, 1.0), 1), (False, None, 2),
    full(True, (2.0, 1.0), 1), full(True, None, 2), full(False, (2.0, 1.0), 2),
    full(True, (2.0, 1.0), 2),
])  # fmt: skip
def test_resumed_batches_are_those_of_one_run(
    streaming, weights, parts, config, tokenizer
):
    config = dataclasses.replace(
        config, streaming=streaming, streams=parts, weights=weights
    )
    made, states, batches = streams.batches(config, tokenizer, range(4)), [], []
    for _ in range(40):  # over several epochs
        states.append(json.dumps(made.get_state()))
        batches.append(next(made))
    for start in [0, 1, *range(2, 37, 3)]:
        resumed = streams.batches(config, tokenizer, range(4))
        resumed.set_state(json.loads(states[start]))
        assert json.dumps(resumed.get_state()) == states[start]
        for want in batches[start : start + 3]:
            for got, array in zip(next(resumed), want, strict=True):
                np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("parts, streaming", one_at_a_time([1, 2], [False, True]))
def test_lengths_are_the_micro_batches_of_epochs(streaming, parts, config, tokenizer):
    config = dataclasses.replace(config, streaming=streaming, streams=parts)
    lengths = streams.lengths(config, tokenizer, None, 3)
    made = streams.batches(config, tokenizer, range(4))
    rows = list(rows_of(itertools.islice(made, int(np.ceil(sum(lengths))))))
    if parts == 1:
        rows = rows[: round(sum(lengths) * config.batch_size)]
    counts = collections.Counter(piece for row in rows for piece in row)
    assert {counts[x] for own in pieces_of(config, tokenizer) for x in own} == {3}


def test_position_in_rows_of_several_epochs_refused(config, tokenizer):
    made = documents.batches(config, tokenizer)
    state = made.get_state()
    old = {"fingerprint": state["fingerprint"], "position": {"parent": {}}}
    with pytest.raises(DataError, match="rows that mix documents of several epochs"):
        made.set_state(old)


def test_epoch_without_a_record_is_an_error(config, tokenizer, monkeypatch):
    config = dataclasses.replace(config, streaming=True)
    made = documents.batches(config, tokenizer)
    monkeypatch.setattr("jaxmem.data.block_files._lines", lambda *_: iter(()))
    with pytest.raises(DataError, match="data.source: an epoch contains no record"):
        for _ in range(1000):
            next(made)
