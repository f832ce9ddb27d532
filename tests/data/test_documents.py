"""Documents, vocabulary, packing and resumption: nothing lost, nothing crossed."""

import collections
import dataclasses
import json
import multiprocessing

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import models, pre_tokenizers

from jaxmem.base.caches import CacheError
from jaxmem.data import documents as data

LENGTH = 16


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def config(directory):
    """Forty documents from 0 to some 100 tokens, around a row's 16 on both sides."""
    random = np.random.default_rng(0)
    words = ["tile", "row", "seed", "été", "数", "\n", "x = y"]
    records = [{"text": " ".join(random.choice(words, size=n))} for n in range(30)]
    records += [
        {"prompt": f"What is {n}?", "response": " ".join(["one"] * n)}
        for n in range(10)
    ]
    return data.DataConfig(
        source=write_jsonl(directory / "corpus.jsonl", records),
        vocab_size=280,
        sequence_length=LENGTH,
        batch_size=4,
        held_out=0.0,
        seed=3,
        cache_dir=str(directory / "cache"),
    )


@pytest.fixture(scope="module")
def tokenizer(config):
    return data.load_tokenizer(config)


def expected_pieces(config, tokenizer):
    """Straight from the contract, one token at a time: (ids, labels) of each piece."""
    bos, eos = (tokenizer.token_to_id(name) for name in ("<bos>", "<eos>"))
    for document in data.load_documents(config.source):
        prompt = tokenizer.encode(document.prompt).ids
        ids = [bos, *prompt, *tokenizer.encode(document.text).ids, eos]
        labels = [
            ids[i + 1] if i + 1 < len(ids) and i + 1 > len(prompt) else -1
            for i in range(len(ids))
        ]
        for cut in range(0, len(ids), config.sequence_length):
            end = cut + config.sequence_length
            yield tuple(ids[cut:end]), tuple(labels[cut:end])


def segments(batch):
    """(ids, labels, positions) of every segment of a batch."""
    for row in range(batch.tokens.shape[0]):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            where = batch.segment_ids[row] == segment
            yield tuple(
                tuple(array[row, where].tolist())
                for array in (batch.tokens, batch.labels, batch.positions)
            )


def same(left, right):
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


# ------------------------------------------------------------------- packing


def test_epoch_holds_pieces_once_with_shifted_labels(config, tokenizer):
    epoch = list(data.batches(config, tokenizer, epochs=1))
    packed = [segment for batch in epoch for segment in segments(batch)]
    assert collections.Counter((ids, labels) for ids, labels, _ in packed) == (
        collections.Counter(expected_pieces(config, tokenizer))
    )
    assert all(positions == tuple(range(len(ids))) for ids, _, positions in packed)


def test_batches_have_documented_shape_and_padding(config, tokenizer):
    epoch = list(data.batches(config, tokenizer, epochs=1))
    for batch in epoch:
        assert isinstance(batch, data.Batch)
        for array in batch:
            assert array.shape == (config.batch_size, config.sequence_length)
            assert array.dtype == np.int32
        padding = batch.segment_ids == 0
        assert (batch.labels[padding] == -1).all()
        assert (batch.tokens[padding] == tokenizer.token_to_id("<pad>")).all()
        # Contiguous segments, padding last: what a segment mask relies on.
        jumps = np.diff(np.where(padding, 10**6, batch.segment_ids), axis=1)
        assert (jumps >= 0).all()


def test_rows_are_nearly_full(config, tokenizer):
    endless = data.batches(config, tokenizer)
    taken = np.stack([next(endless).segment_ids for _ in range(60)])
    assert (taken == 0).mean() < 0.05  # under 0.01 at 256 tokens a row


def test_document_that_fits_in_a_row_is_never_cut(config, tokenizer):
    epoch = list(data.batches(config, tokenizer, epochs=1))
    bos, eos = tokenizer.token_to_id("<bos>"), tokenizer.token_to_id("<eos>")
    packed = [ids for batch in epoch for ids, _, _ in segments(batch)]
    for ids in packed:
        if len(ids) < config.sequence_length and ids[0] == bos:
            assert ids[-1] == eos


def test_prompt_has_no_labels_and_a_response_has_all(config, tokenizer, directory):
    record = {"prompt": "two plus two", "response": "four"}
    source = write_jsonl(directory / "one.jsonl", [record])
    one = dataclasses.replace(config, source=source, sequence_length=64, batch_size=1)
    (batch,) = data.batches(one, tokenizer, epochs=1)
    length = len(tokenizer.encode("two plus two").ids)
    answer = tokenizer.encode("four").ids
    assert (batch.labels[0, :length] == -1).all()
    scored = batch.labels[0][batch.labels[0] >= 0]
    assert scored.tolist() == [*answer, tokenizer.token_to_id("<eos>")]
    assert batch.labels[0, length] == answer[0]


# --------------------------------------------------- order, resumption, epochs


def test_batches_depend_on_settings_and_seed(config, tokenizer):
    first, second = (data.batches(config, tokenizer) for _ in range(2))
    other = data.batches(dataclasses.replace(config, seed=4), tokenizer)
    pairs = [(next(first), next(second), next(other)) for _ in range(40)]
    assert all(same(a, b) for a, b, _ in pairs)
    assert not any(same(a, c) for a, _, c in pairs)


def test_documents_come_in_a_new_order_each_epoch(config, tokenizer, monkeypatch):
    monkeypatch.setattr("jaxmem.data.packed.ROWS_OPEN", 1)  # rows filled in turn
    packed = [
        ids
        for batch in data.batches(config, tokenizer, epochs=2)
        for ids, _, _ in segments(batch)
    ]
    first, second = packed[: len(packed) // 2], packed[len(packed) // 2 :]
    in_the_file = [ids for ids, _ in expected_pieces(config, tokenizer)]
    assert sorted(first) == sorted(second) == sorted(in_the_file)
    assert first != in_the_file and second != in_the_file and first != second


def test_epochs_without_shuffling_keep_file_order(config, tokenizer):
    config = dataclasses.replace(config, shuffle=False)
    expected = [*expected_pieces(config, tokenizer)] * 2
    made = data.batches(config, tokenizer, epochs=2)
    first = [next(made) for _ in range(7)]
    resumed = data.batches(config, tokenizer, epochs=2)
    resumed.set_state(json.loads(json.dumps(made.get_state())))
    packed = [
        (ids, labels)
        for batch in (*first, *resumed)
        for ids, labels, _ in segments(batch)
    ]
    assert packed == expected
    with pytest.raises(data.DataError, match="belongs to other data"):
        shuffled = dataclasses.replace(config, shuffle=True)
        data.batches(shuffled, tokenizer).set_state(made.get_state())


def test_resumes_bitwise_from_every_point(config, tokenizer):
    undisturbed = data.batches(config, tokenizer)
    states, expected = [], []
    for _ in range(150):  # several refills of the packer, across several epochs
        states.append(json.dumps(undisturbed.get_state()))
        expected.append(next(undisturbed))
    refill = range(61, 68)  # 256 rows are packed at a time, 64 batches
    for start in [*range(0, 147, 13), *refill]:
        resumed = data.batches(config, tokenizer)
        resumed.set_state(json.loads(states[start]))
        assert json.dumps(resumed.get_state()) == states[start]
        for batch in expected[start : start + 3]:
            assert same(next(resumed), batch)


@pytest.mark.parametrize(
    "change", [{"seed": 4}, {"sequence_length": 32}, {"batch_size": 2}]
)
def test_refuses_a_position_in_other_data(config, tokenizer, change):
    state = data.batches(config, tokenizer).get_state()
    other = data.batches(dataclasses.replace(config, **change), tokenizer)
    with pytest.raises(data.DataError, match="belongs to other data"):
        other.set_state(state)


def test_held_out_documents_independent_of_order(config):
    documents = data.load_documents(config.source)
    training, evaluation = data.split_documents(documents, 0.2)
    assert len(evaluation) == 8
    assert set(training) | set(evaluation) == set(documents)
    assert not set(training) & set(evaluation)
    assert set(data.split_documents(documents[::-1], 0.2)[1]) == set(evaluation)


@pytest.mark.parametrize("copies", [1, 60, 100])
def test_equal_documents_are_on_one_side(copies):
    texts = ["same"] * copies + [f"other {i}" for i in range(100 - copies)]
    documents = [data.Document(str(i), text) for i, text in enumerate(texts)]
    training, evaluation = data.split_documents(documents, 0.5)
    assert not {d.text for d in training} & {d.text for d in evaluation}
    assert len(training) + len(evaluation) == 100 and len(evaluation) <= 50


def test_evaluation_batches_hold_only_held_out_text(config, tokenizer):
    some = dataclasses.replace(config, held_out=0.2)
    training = collections.Counter(
        ids
        for b in data.batches(some, tokenizer, epochs=1)
        for ids, _, _ in segments(b)
    )
    evaluation = collections.Counter(
        ids
        for b in data.batches(some, tokenizer, split="evaluation", epochs=1)
        for ids, _, _ in segments(b)
    )
    everything = collections.Counter(ids for ids, _ in expected_pieces(some, tokenizer))
    assert evaluation and training + evaluation == everything


def test_empty_split_and_an_unknown_one_are_errors(config, tokenizer):
    with pytest.raises(data.DataError, match="leaves no document for evaluation"):
        data.batches(config, tokenizer, split="evaluation")
    with pytest.raises(ValueError, match="got 'test'"):
        data.batches(config, tokenizer, split="test")
    some = dataclasses.replace(config, held_out=1e-6)  # at least one document
    assert len(list(data.batches(some, tokenizer, split="evaluation", epochs=1)))
    many = dataclasses.replace(config, batch_size=4096, streams=4096)
    with pytest.raises(
        data.DataError, match="data.streams=4096 is above the .* documents"
    ):
        data.batches(many, tokenizer, stream=0)


def test_one_document_cannot_be_held_out_in_part(tokenizer, tmp_path):
    (tmp_path / "one.txt").write_text("a text")
    config = data.DataConfig(source=str(tmp_path / "one.txt"), held_out=0.1)
    message = "is one document, which jaxmem does not divide; set data.held_out=0, or "
    with pytest.raises(data.DataError, match=message):
        data.batches(config, tokenizer, split="evaluation")
    twice = tmp_path / "twice.jsonl"  # equal documents are on one side
    twice.write_text('{"text": "a"}\n' * 2)
    config = dataclasses.replace(config, source=str(twice), held_out=0.5)
    with pytest.raises(data.DataError, match=message):
        data.batches(config, tokenizer, split="evaluation")


# --------------------------------------------------------------- vocabulary


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_vocabulary(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_written_in_a_text_are_text(tokenizer):
    ids = tokenizer.encode("a<eos>b<pad>").ids
    assert not set(ids) & {tokenizer.token_to_id(t) for t in data.SPECIAL_TOKENS}
    assert [tokenizer.token_to_id(t) for t in data.SPECIAL_TOKENS] == [0, 1, 2]


@pytest.fixture
def fresh(config, tmp_path):
    """The config, with a cache of its own, which is tmp_path."""
    return dataclasses.replace(config, cache_dir=str(tmp_path))


def test_vocabulary_is_trained_once(fresh, tmp_path, monkeypatch):
    first = data.load_tokenizer(fresh)
    (cached,) = tmp_path.iterdir()
    monkeypatch.setattr(data, "_train_vocabulary", None)
    assert data.load_tokenizer(fresh).to_str() == first.to_str()
    assert list(tmp_path.iterdir()) == [cached]


def test_cache_that_cannot_be_written_names_its_key(fresh, tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/below"):
        given = dataclasses.replace(fresh, cache_dir=str(tmp_path / name))
        with pytest.raises(CacheError, match=f"^data.cache_dir='.*{name}': vocabular"):
            data.load_tokenizer(given)


def test_other_text_or_size_is_another_vocabulary(fresh, tmp_path):
    data.load_tokenizer(fresh)
    data.load_tokenizer(dataclasses.replace(fresh, vocab_size=270))
    data.load_tokenizer(dataclasses.replace(fresh, held_out=0.5))
    assert len(list(tmp_path.iterdir())) == 3


def test_changed_vocabulary_in_cache_is_named(fresh, tmp_path):
    data.load_tokenizer(fresh)
    (path,) = tmp_path.glob("**/vocabulary-*.json")
    kept = json.loads(path.read_text())
    for content in (
        {**kept, "vocabulary": kept["vocabulary"].replace('"a":', '"b ":', 1)},
        {"vocabulary": kept["vocabulary"]},
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(
            data.DataError, match="its digest does not match its content"
        ):
            data.load_tokenizer(fresh)


def test_endless_pattern_names_tokenizer_and_record(config):
    endless = tokenizers.Tokenizer(models.WordLevel({"<bos>": 0, "<eos>": 1}, "<eos>"))
    pattern = tokenizers.Regex(r"(a+)+$")
    endless.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    document = data.Document("x.jsonl:7", "a" * 40 + "b")
    with pytest.raises(
        data.DataError, match="tokenizer.json .* fails at x.jsonl:7, or"
    ):
        list(data.encode_documents([document], endless))


@pytest.mark.slow
def test_two_processes_train_one_vocabulary(fresh, tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        left, right = pool.map(data.load_tokenizer, [fresh] * 2)
    assert left.to_str() == right.to_str()
    assert len(list(tmp_path.iterdir())) == 1


def test_damaged_cache_is_named(fresh, tmp_path):
    data.load_tokenizer(fresh)
    (cached,) = tmp_path.iterdir()
    cached.write_text("{")
    with pytest.raises(data.DataError, match=f"{cached.name}.*delete the file"):
        data.load_tokenizer(fresh)


def test_too_little_text_says_how_many_entries_it_has(fresh):
    greedy = dataclasses.replace(fresh, vocab_size=5000)
    with pytest.raises(data.DataError, match=r"set data\.vocab_size=\d+") as caught:
        data.load_tokenizer(greedy)
    size = int(str(caught.value).rpartition("vocab_size=")[2].split()[0])
    enough = dataclasses.replace(fresh, vocab_size=size)
    assert data.load_tokenizer(enough).get_vocab_size() == size


def test_ids_without_checkpoint_name_record_and_key(fresh, tmp_path):
    (path := tmp_path / "ids.jsonl").write_text('{"input_ids": [7, 900]}\n')
    config = dataclasses.replace(fresh, source=str(path), vocab_size=300)
    with pytest.raises(data.DataError) as caught:
        data.load_tokenizer(config)
    assert str(caught.value) == (
        f"{path}:1: input_ids has 7. Without a checkpoint, jaxmem trains a vocabulary "
        f"on the text of {str(path)!r}, which is enough for only 259 of "
        "data.vocab_size=300 entries; set model.checkpoint to the model whose "
        "tokenizer wrote the ids"
    )
    small = dataclasses.replace(config, vocab_size=259)
    with pytest.raises(data.DataError) as caught:
        data.batches(small, data.load_tokenizer(small))
    assert str(caught.value) == (
        f"{path}:1: input_ids has 900, but the vocabulary of model.checkpoint "
        "(without a checkpoint, of data.vocab_size) has only 259 entries; set "
        "model.checkpoint to the model whose tokenizer wrote the ids"
    )


# ---------------------------------------------------------------- documents


def test_standard_library_is_text_in_fixed_order():
    documents = data.load_documents("stdlib")
    assert documents == data.load_documents("stdlib")
    names = [document.name for document in documents]
    assert {"argparse.py", "dataclasses.py", "help(for)"} <= set(names)
    assert len(set(names)) == len(names)
    assert sum(len(document.text) for document in documents) > 3_000_000


def test_blank_lines_part_the_documents_of_a_text_file(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_text("\ufeffone\n 1\n\n \t\r\ntwo\n\n", encoding="utf-8")
    first = data.Document(f"{path}:1", "one\n 1")
    assert data.load_documents(str(path)) == [
        first, data.Document(f"{path}:5", "two")
    ]  # fmt: skip
    path.write_bytes(b"one\n 1\r\n\r\ntwo\r\n2\r\n\n")
    assert data.load_documents(str(path)) == [
        first, data.Document(f"{path}:4", "two\r\n2")
    ]  # fmt: skip


def test_jsonl_keeps_unicode_separators_skips_blanks(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\u2028b", "id": 7}\r\n\n{"text": ""}', encoding="utf-8")
    assert [d.text for d in data.load_documents(str(path))] == ["a\u2028b", ""]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "not valid JSON: .*column 13"),
        ("[1, 2]", r"expected a JSON object, got \[1, 2\]"),
        ('{"body": "a"}', "got the keys 'body'"),
        ("{}", r"got the keys \(none\)"),
        ('{"prompt": "a"}', '"prompt" and "completion" or "text"; got the keys'),
        ('{"text": "a", "prompt": "b", "response": "c"}', 'which do not use "text"'),
        ('{"text": 3}', '"text" must be a string, got 3'),
        ('{"prompt": "a", "response": null}', "got the keys 'prompt'"),
        (r'{"text": "\ud800"}', "half of a surrogate pair"),
    ],
)
def test_malformed_line_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(data.DataError, match=rf"bad\.jsonl:3: .*{message}"):
        data.load_documents(str(path))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "stdlb",
            '"stdlib", a folder, or the path of a .jsonl, .json, .csv, .tsv, .parquet',
        ),
        ("data.xlsx", "got 'data.xlsx'"),
        ("absent.txt", "cannot read absent.txt: No such file"),
        ("absent.jsonl", "cannot read absent.jsonl: No such file"),
    ],
)
def test_unusable_source_is_named(source, message):
    with pytest.raises(data.DataError, match=message):
        data.load_documents(source)


def test_invalid_utf8_and_empty_files_are_errors(tmp_path):
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9 noir")
    with pytest.raises(
        data.DataError, match=r"latin\.txt is not UTF-8 text \(byte 3\)"
    ):
        data.load_documents(str(latin))
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    nothing = tmp_path / "empty.txt"
    nothing.touch()
    for path in (empty, nothing):
        with pytest.raises(data.DataError, match=r"data\.source: .* contains no text"):
            data.load_documents(str(path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sequence_length", 0),
        ("batch_size", -1),
        ("vocab_size", 258),
        ("held_out", 1.0),
        ("seed", -1),
    ],
)
def test_impossible_settings_are_named(field, value):
    with pytest.raises(ValueError, match=rf"DataConfig\.{field} must be .*{value}"):
        data.DataConfig(**{field: value})
