"""Records from a grammar: a right rendering, or one line of ours that names them.

Fields are missing, null, of another type, nested, in any script, or of 10^5 characters.
"""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from jaxmem.data.chat import ChatTemplate
from jaxmem.data.encoding import encode_documents
from jaxmem.data.record_reader import RecordReader
from jaxmem.data.records import DataError, RawRecord
from tests.helpers import texts

WHERE = "data.jsonl:7"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}]{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHARACTERS = "ab \n\t\"'\\{}[]<|>é日🙂\u2028\u200f\x00\x7f%}"
CALL = {"function": {"name": "f", "arguments": '{"a": 1}'}}


class Grammar:
    """Random values."""

    def __init__(self, rng):
        self.rng = rng

    def text(self):
        if self.rng.random() < 0.005:
            return self.rng.choice(CHARACTERS[:2]) * 10**5
        return "".join(self.rng.choices(CHARACTERS, k=self.rng.randrange(12)))

    def anything(self, depth=0):
        kinds = [None, True, 0, -1, 1.5, 10**30, float("nan"), self.text(), [], {}]
        if depth < 3:
            kinds.append(
                [self.anything(depth + 1) for _ in range(self.rng.randrange(3))]
            )
            kinds.append({self.text(): self.anything(depth + 1)})
        return self.rng.choice(kinds)

    def content(self):
        if self.rng.random() < 0.8:
            return self.text()
        return [{"type": "text", "text": self.text()} for _ in range(2)]

    def messages(self):
        turns, rng = [], self.rng
        for role in ("user", "assistant") * rng.randrange(1, 3):
            turns.append({"role": role, "content": self.content()})
            if role == "assistant" and rng.random() < 0.2:
                turns[-1]["tool_calls"] = [CALL]
            if role == "assistant" and rng.random() < 0.1:
                turns[-1]["weight"] = rng.choice([0, 1, 0.5])
        return turns[: len(turns) - rng.choice([0, 0, 0, 1])]

    def record(self):
        text, messages = self.text, self.messages
        return self.rng.choice(
            [
                lambda: {"text": text()},
                lambda: {"prompt": text(), "completion": text()},
                lambda: {"question": text(), "answer": text(), "system": text()},
                lambda: {"messages": messages()},
                lambda: {"prompt": messages()[:1], "completion": messages()[1:]},
                lambda: {"conversations": [
                    {"from": x, "value": text()} for x in ("human", "gpt")]},
                lambda: {"instruction": text(), "input": text(), "output": text()},
                lambda: {"input_ids": [3, 4, 5], "labels": [-100, 4, 5]},
                lambda: {"prompt": text(), "chosen": text(), "rejected": text()},
                lambda: {"chosen": messages(), "rejected": messages()},
            ]
        )()  # fmt: skip

    def changed(self, value, depth=0):
        """The value, with something in it removed, added, or of another type."""
        rng = self.rng
        if rng.random() < 0.2 or not (isinstance(value, (dict, list)) and value):
            return self.anything()
        if isinstance(value, list):
            i = rng.randrange(len(value))
            return [*value[:i], self.changed(value[i], depth + 1), *value[i + 1 :]]
        made, key = dict(value), rng.choice([*value])
        match rng.randrange(4):
            case 0:
                del made[key]
            case 1:
                made[key] = None
            case 2:
                named = ["name", "weight", "tools", "x", "role", "content", self.text()]
                made[rng.choice(named)] = self.anything()
            case _:
                made[key] = self.changed(made[key], depth + 1)
        return made


def plain(record):
    """The text of a conversation of texts alone, from its definition; else None."""
    turns = record.get("messages")
    if record.keys() != {"messages"} or not isinstance(turns, list) or not turns:
        return None
    for turn in turns:
        good = isinstance(turn, dict) and turn.keys() == {"role", "content"}
        if not (good and all(isinstance(x, str) for x in turn.values())):
            return None
    return "".join(f"<|{turn['role']}|>{turn['content']}</s>" for turn in turns)


def strings(value):
    """The texts of a valid message: its content, or that of its parts."""
    if isinstance(value, str):
        return [value]
    return [part["text"] if isinstance(part, dict) else part for part in value or []]


@pytest.fixture(scope="module")
def tokenizer():
    return texts.tokenizer()


def check_document(document, record, tokenizer):
    ((tokens, labels),) = encode_documents([document], tokenizer)
    assert len(tokens) == len(labels) and labels[-1] == -1
    live = labels >= 0
    np.testing.assert_array_equal(labels[live], tokens[1:][live[:-1]])
    if (want := plain(record)) is not None:
        assert document.text == want
        own = [t["content"] for t in record["messages"] if t["role"] == "assistant"]
        counted = [document.text[a:b] for a, b in document.counted]
        assert counted == [content + "</s>" for content in own]
    elif document.counted is not None:
        for turn in record.get("messages") or record.get("conversations") or []:
            for said in strings(turn.get("content", turn.get("value"))):
                assert said in document.text
    elif document.ids is None:
        given = [x for x in record.values() if isinstance(x, str)]
        assert document.text in given and document.prompt in [*given, ""]


def read(reader, kind, record, tokenizer):
    """True if a record was read; raises where the result or the error is not right."""
    try:
        made = getattr(reader, kind)(RawRecord(WHERE, record))
        if kind == "document":
            check_document(made, record, tokenizer)
        elif kind == "answers":
            chosen, rejected = made
            assert chosen != rejected
    except DataError as error:
        said = str(error)
        assert said.startswith(WHERE), said[:200]
        assert "\n" not in said and len(said) < 900, said[:1200]
        return False
    return True


KINDS = ["document", "answers", "prompt"]


def reader_of():
    template = ChatTemplate(TEMPLATE, {}, "template", ["</s>"])
    return RecordReader(lambda: template)


@pytest.mark.parametrize("kind", KINDS)
def test_records_as_they_should_be(kind, tokenizer):
    reader, grammar = reader_of(), Grammar(random.Random(kind))
    taken = [read(reader, kind, grammar.record(), tokenizer) for _ in range(400)]
    assert sum(taken) > 40  # of some forms


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(rng=st.randoms(use_true_random=False), changes=st.integers(1, 3))
@settings(
    max_examples=150, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
def test_any_record(kind, tokenizer, rng, changes):
    grammar = Grammar(rng)
    record = grammar.record()
    for _ in range(changes):
        record = grammar.changed(record)
        if not isinstance(record, dict):
            record = {"text": record}
    read(reader_of(), kind, record, tokenizer)
