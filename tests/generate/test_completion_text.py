"""Texts that grow by tokens: stop strings across borders, characters in parts."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxmem.generate.completion_text import CompletionText


@pytest.fixture(scope="module")
def of_bytes():
    """Every byte is a token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


@pytest.fixture(scope="module")
def of_words():
    """A tokenizer like Llama's, whose decoder drops the first space."""
    words = ["▁a", "▁b", "c", "▁cd", "d", "▁"]
    vocabulary = {word: i for i, word in enumerate(words)}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="c"))
    made.decoder = decoders.Metaspace()
    return made


def shown(text, ids, size=1):
    """Texts that a terminal shows, piece by piece."""
    pieces, seen = [], 0
    for start in range(0, len(ids), size):
        text.add(ids[start : start + size])
        pieces.append(text.settled[seen:])
        seen += len(pieces[-1])
    return pieces


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("stops", "expected", "stop"),
    [
        ((), "grün, äh: 東京 STOP!", None),
        (("STOP",), "grün, äh: 東京 ", "STOP"),
        (("P!", "h: 東京", "STOP"), "grün, ä", "h: 東京"),
        (("grü",), "", "grü"),
        (("STOPP", "zz"), "grün, äh: 東京 STOP!", None),
    ],
)
def test_text_ends_before_a_stop_string(of_bytes, stops, expected, stop, size):
    ids = of_bytes.encode("grün, äh: 東京 STOP!").ids
    text = CompletionText(of_bytes, of_bytes.encode("Frage").ids, stops)
    pieces = shown(text, ids, size)
    assert (text.whole, text.stop) == (expected, stop)
    assert expected.startswith("".join(pieces))
    assert "\ufffd" not in "".join(pieces)
    if stop is not None:
        assert "".join(pieces) == expected
        # The last token is the one that completes the stop string, whatever the size.
        through = of_bytes.encode(expected + stop).ids
        assert text.ids == through


def test_stream_withholds_possible_stop_strings(of_bytes):
    text = CompletionText(of_bytes, [], ("<end>", "ed."))
    pieces = shown(text, of_bytes.encode("a <e <en <ed.").ids)
    assert pieces == ["a", " ", "", "", "<e ", "", "", "", "<en ", "", "", "<", ""]
    assert text.whole == "a <e <en <"


def test_space_after_the_prompt_is_kept(of_words):
    text = CompletionText(of_words, [0], ())
    text.add([1, 2])
    assert of_words.decode([1, 2]) == "bc" and text.whole == " bc"
