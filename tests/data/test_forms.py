"""Forms of records by their columns; no column's content is lost in silence."""

import gzip
import json

import numpy as np
import pytest

from jaxmem.data import encoding, pairs
from jaxmem.data.chat import ChatTemplate
from jaxmem.data.record_reader import RecordReader
from jaxmem.data.records import DataError, RawRecord, read_records
from jaxmem.data.texts import load_documents, split
from tests.helpers.templates import (
    CHATML,
    GEMMA,
    LLAMA2,
    LLAMA3,
    NAMED,
    SPECIAL,
    tokenizer as tokenizer,
)

pytest.importorskip("jinja2")

# Tools, calls as JSON, and the reasoning of the last turn alone, as in Qwen3.
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{% if m.content is string %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% set c = c.function or c %}<call>"
    "{{ c.name }} {{ c.arguments if c.arguments is string else c.arguments | tojson }}"
    "</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% endif %}{% endif %}"
)
# Arguments are JSON already, and a missing content is null, as in DeepSeek-V3.
STRINGS = (
    "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}"
    "{% if m.content is none %}{% for c in m.tool_calls %}{{ c.function.name + '\n' + "
    "c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}</s>"
    "{% endfor %}"
)
# Prints whatever it is given; arguments of calls are encoded once more.
PRINTS = (
    "{% for m in messages %}<|user|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments }}{% endfor %}</s>{% endfor %}"
)
HI, HO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
TOOL = {"type": "function", "function": {"name": "sky", "description": "Its color."}}


def call(arguments, **others):
    function = {"name": "sky", "arguments": arguments}
    calls = [{"id": "1", "type": "function", "function": function}]
    return {"role": "assistant", "tool_calls": calls} | others


def reader(template=TOOLS, **options):
    made = ChatTemplate(template, NAMED, "template", SPECIAL)
    return RecordReader(lambda: made, **options)


def document(record, template=TOOLS, **options):
    return reader(template, **options).document(RawRecord("a.jsonl:1", record))


def learned(made):
    return [made.text[a:b] for a, b in made.counted]


# ------------------------------------------------------------------- messages


def test_tools_reach_the_model():
    for tools in ([TOOL], json.dumps([TOOL])):
        made = document({"messages": [HI, HO], "tools": tools})
        assert json.dumps(TOOL) in made.text and learned(made) == ["ho<|im_end|>"]
    with pytest.raises(DataError, match=r"a\.jsonl:1: .* leaves out tools"):
        document({"messages": [HI, HO], "tools": [TOOL]}, CHATML)
    with pytest.raises(DataError, match="tools must be a list of schemas, got 5"):
        document({"messages": [HI, HO], "tools": 5})


def test_tool_arguments_decoded_for_templates():
    for arguments in ({"city": "Oslo", "days": 2}, '{"city": "Oslo", "days": 2}'):
        made = document({"messages": [HI, call(arguments), HO]})
        assert '<call>sky {"city": "Oslo", "days": 2}</call><|im_end|>' in made.text
        assert learned(made)[0].startswith("<call>") and len(learned(made)) == 2
        made = document({"messages": [HI, call(arguments, content=None)]}, STRINGS)
        assert 'sky\n{"city": "Oslo", "days": 2}</s>' in made.text
    made = document({"messages": [HI, call('{"a":1}')]}, STRINGS)
    assert 'sky\n{"a":1}' in made.text  # as it was given
    with pytest.raises(DataError, match=r"tool_calls\[0\].function.arguments: not val"):
        document({"messages": [HI, call("{")]})
    with pytest.raises(
        DataError, match="arguments must be an object, or an object as JSON text"
    ):
        document({"messages": [HI, call("[1]")]})


def test_printed_fields_get_a_printable_form():
    made = document({"messages": [HI, call({"a": "b"}, content="x")]}, PRINTS)
    assert 'xsky{"a": "b"}</s>' in made.text
    made = document({"messages": [HI, call({"a": "b"})]}, PRINTS)
    assert "None" not in made.text


def test_parts_of_content_are_one_text():
    parts = [{"type": "text", "text": "no"}, {"type": "text", "text": "on"}]
    for template in (CHATML, LLAMA3, GEMMA, TOOLS):
        made = document(
            {"messages": [HI | {"content": parts}, HO | {"content": parts}]}, template
        )
        assert made.text.count("noon") == 2 and "type" not in made.text
        (answer,) = learned(made)
        assert answer.startswith("noon")
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(DataError, match=r'content\[0\] must be a part .*"text", got '
                       "'image_url'"):  # fmt: skip
        document({"messages": [HI | {"content": [image]}, HO]})


def test_null_is_an_absent_key():
    nothing = dict.fromkeys(("tool_calls", "name", "reasoning_content", "weight"))
    made = document({"messages": [HI | nothing, HO | nothing], "tools": None})
    assert made.text == document({"messages": [HI, HO]}).text


def test_weights_of_messages_are_used_or_refused():
    for flag in ("weight", "train", "loss"):
        turns = [HI, HO | {flag: 0}, HI, {"role": "assistant", "content": "b", flag: 1}]
        for template in (CHATML, TOOLS):
            made = document({"messages": turns}, template)
            assert learned(made) == ["b<|im_end|>"]
    with pytest.raises(DataError, match=r'"messages"\[1\].weight must be 0 or 1: othe'):
        document({"messages": [HI, HO | {"weight": 0.5}]})
    with pytest.raises(DataError, match=r'"messages"\[0\].train must be 0, or left o'):
        document({"messages": [HI | {"train": True}, HO]})


THOUGHT = HO | {"reasoning_content": "hm"}
# As the distilled DeepSeek-R1 models, and as Qwen3 where reasoning is in the content.
SPLITS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content.split('</think>')[-1] | trim }}</s>\n{% endfor %}"
)
KEEPS_LAST = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else "
    "m.content.split('</think>')[-1].lstrip() }}</s>\n{% endfor %}"
)
THINKS = HO | {"content": "<think>hm, the sun</think>\n\nnoon"}


def test_lost_reasoning_of_counted_turn_is_an_error():
    with pytest.raises(DataError) as caught:
        reader().document(RawRecord("a:1", {"messages": [HI, THOUGHT, HI, THOUGHT]}))
    assert str(caught.value) == (
        "a:1: the chat template leaves out all of messages[1].reasoning_content (2 "
        'characters), which the loss counts; give the message "weight": 0, set '
        'data.stripped="mask" (such turns do not count) or "count" (the rest counts), '
        "or data.chat_template"
    )
    muted = reader()
    turns = [HI, THOUGHT | {"weight": 0}, HI, THOUGHT]
    for i in range(3):
        made = muted.document(RawRecord(f"a:{i}", {"messages": turns}))
    assert learned(made) == ["<think>hm</think>ho<|im_end|>"]
    assert muted.lines()[-1] == (
        "the chat template leaves out text of 'reasoning_content' that the loss does "
        "not count, in characters: 6 (first a:0)"
    )
    asked = reader()
    asked.prompt(RawRecord("a:1", {"prompt": [HI, THOUGHT, HI]}))
    assert asked.lines()[-1].endswith("not count, in characters: 2 (first a:1)")


@pytest.mark.parametrize(
    ("stripped", "answers"),
    [
        ("mask", ["<think>hm</think>ho<|im_end|>"]),
        ("count", ["ho<|im_end|>", "<think>hm</think>ho<|im_end|>"]),
    ],
)
def test_stripped_turns_count_as_the_user_says(stripped, answers):
    made = reader(stripped=stripped)
    turns = [HI, THOUGHT, HI, THOUGHT]
    assert learned(made.document(RawRecord("a:1", {"messages": turns}))) == answers
    assert made.lines()[-1] == (
        "the chat template leaves out text of 'reasoning_content' that the loss would "
        f"count (data.stripped='{stripped}'), in characters: 2 (first a:1)"
    )


@pytest.mark.parametrize(
    ("template", "turns", "message"),
    [
        (
            SPLITS,
            [HI, THINKS],
            "'<think>hm, the sun</think>' of messages.1..content .24",
        ),
        (KEEPS_LAST, [HI, THINKS, HI, THINKS], "sun</think>' of messages.1..content"),
        (
            SPLITS.replace(".split('</think>')[-1]", "[:9]"),
            [HI, HO | {"content": "seven eight nine"}],
            "'ht nine' of messages.1..content",
        ),
        # A part of the same words is written elsewhere.
        (
            SPLITS,
            [HI | {"content": "hm, the sun"}, THINKS],
            "sun</think>' of messages.1",
        ),
        (SPLITS, [THINKS, THINKS], "of messages.0..content"),
    ],
)
def test_text_that_a_counted_turn_loses_is_an_error(template, turns, message):
    with pytest.raises(DataError, match=f"a.jsonl:1: .* leaves out {'.*'}{message}"):
        document({"messages": turns}, template)


def test_stripped_turn_that_does_not_count_is_said():
    made = reader(SPLITS)
    turns = [HI, THINKS | {"train": False}, HI, HO]
    assert learned(made.document(RawRecord("a:7", {"messages": turns}))) == ["ho</s>"]
    assert made.lines()[-1] == (
        "the chat template leaves out text of 'content' that the loss does not count, "
        "in characters: 24 (first a:7)"
    )


@pytest.mark.parametrize(
    ("template", "special"),
    [
        (CHATML, ["</s>"]),  # <|im_end|> is plain text
        (CHATML, []),
        (CHATML.replace("<|im_end|>", ""), SPECIAL),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
            "</s>{% endfor %}",
            SPECIAL,
        ),
    ],
)
def test_turns_without_a_special_end_are_said_once(template, special):
    made = ChatTemplate(template, NAMED, "chatml.jinja", special)
    inside = ", within {% generation %}" if "{% generation" in template else ""
    name = f"chatml.jinja{inside}"
    endless, ended = RecordReader(lambda: made), reader(CHATML)
    for each in (endless, ended):
        for line in (1, 2):
            each.document(RawRecord(f"a:{line}", {"messages": [HI, HO]}))
    assert endless.lines()[1:] == [
        "no special token ends the text of a turn that the loss counts, so the model "
        f"will not learn to stop; end turns with {{{{ eos_token }}}} in {name}, or add "
        "the token that ends them to tokenizer.json as a special token; conversations: "
        "2 (first a:1)"
    ]
    assert len(ended.lines()) == 1


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (SPLITS, 0),  # trims
        ("{% for m in messages %}{{ m.content | upper }}</s>{% endfor %}", 2),
        ("{% for m in messages %}{{ m.content | tojson }}</s>{% endfor %}", 0),
        (
            "{% for m in messages %}{{ m.content.split() | join(' ') }}</s>"
            "{% endfor %}",
            1,
        ),
        (
            "{% for m in messages %}<{{ m.role }}>{% if '<b>' in m.content %}[bold]"
            "{% endif %}{{ m.content.lstrip('\n') }}</s>{% endfor %}",
            0,
        ),
    ],
)
def test_text_rewritten_by_template_is_whole(template, said):
    made = reader(template)
    turns = [HI, HO | {"content": '\n  a <b>"noon"</b>\n\n and on\n'}]
    document = made.document(RawRecord("a:1", {"messages": turns}))
    assert len(learned(document)) == 1
    note = "the chat template changes 'content' when it writes it"
    said_lines = [line for line in made.lines()[1:] if line.startswith(note)]
    assert said_lines == [f"{note}: {said} (first a:1)"] * bool(said)


def test_conditionally_written_field_is_looked_for():
    hides = (
        "{% for m in messages %}{{ m.content }}"
        "{% if m.content == 'ho' %} by {{ m.name }}{% endif %}</s>{% endfor %}"
    )
    made = reader(hides)
    turns = [HI, HO | {"name": "bob"}]
    assert "by bob" in made.document(RawRecord("a:1", {"messages": turns})).text
    turns = [HI, {"role": "assistant", "content": "no", "name": "bob"}]
    with pytest.raises(DataError, match=r"leaves out messages\[1\].name"):
        made.document(RawRecord("a:2", {"messages": turns}))


@pytest.mark.parametrize(
    ("turn", "template", "place"),
    [
        (HO | {"reasoning_content": "hm"}, CHATML, r"messages\[1\].reasoning_content"),
        (HO | {"name": "bob"}, TOOLS, r"messages\[1\].name"),
        (call({"a": "b"}, content="c"), LLAMA3, r"messages\[1\].tool_calls"),
        (HO | {"score": 0.7}, CHATML, r"messages\[1\].score"),
        (HO | {"audio": {"id": "x", "data": "y"}}, CHATML, r"messages\[1\].audio"),
    ],
)
def test_field_left_out_by_template_is_refused(turn, template, place):
    with pytest.raises(DataError, match=f"a.jsonl:1: .* leaves out {place}; remove it"):
        document({"messages": [HI, turn]}, template)


def test_content_is_looked_for_by_marker():
    hides = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}</s>"
    hides += "{% endif %}{% endfor %}"
    turns = [{"role": "system", "content": "hi"}, HI, HO]  # the same words twice
    with pytest.raises(DataError, match=r"leaves out messages\[0\].content"):
        document({"messages": turns}, hides)


def test_ignored_keys_and_named_columns():
    made = document({"messages": [HI, HO | {"name": "bob"}]}, ignored=("name",))
    assert "bob" not in made.text
    columns = {"prompt": "ask", "completion": "say"}
    read = reader(columns=columns)
    made = read.document(RawRecord("a:1", {"ask": "a", "say": "b", "prompt": "no"}))
    assert (made.prompt, made.text) == ("a", "b")
    assert read.lines()[1:] == ["the column 'prompt' is not used: 1 (first a:1)"]
    with pytest.raises(DataError, match="data.columns: 'promt' is not a name that"):
        reader(columns={"promt": "x"})
    with pytest.raises(DataError, match="data.columns names 'x', but no record has"):
        made = reader(columns={"tools": "x"})
        with made.whole_pass():
            made.document(RawRecord("a:1", {"text": "b"}))


# ---------------------------------------------------------------------- forms


@pytest.mark.parametrize(
    ("record", "said", "text", "answer"),
    [
        (
            {"conversations": [{"from": "human", "value": "hi"},
                               {"from": "gpt", "value": "ho"}]},
            "ShareGPT conversations", None, "ho<|im_end|>",
        ),
        (
            {"system": "Be kind.", "conversations": [{"from": "human", "value": "hi"},
                                                     {"from": "gpt", "value": "ho"}]},
            "ShareGPT conversations", "Be kind.", "ho<|im_end|>",
        ),
        (
            {"instruction": "Add.", "input": "1 2", "output": "3"},
            "Alpaca's instructions", "user\nAdd.\n1 2<|im_end|>", "3<|im_end|>",
        ),
        (
            {"instruction": "Say.", "context": "", "response": "ho", "category": "x"},
            "Alpaca's instructions", "user\nSay.<|im_end|>", "ho<|im_end|>",
        ),
        (
            {"prompt": "hi", "prompt_id": "7", "messages": [HI, HO]},
            "conversations", "user\nhi<|im_end|>", "ho<|im_end|>",
        ),
        (
            {"system": "Be kind.", "question": "hi", "response": "ho"},
            "prompts and answers", "system\nBe kind.", "ho<|im_end|>",
        ),
        (
            {"prompt": [HI], "completion": HO},
            "prompts and answers", "user\nhi", "ho<|im_end|>",
        ),
    ],
)  # fmt: skip
def test_common_sets_are_read_by_their_columns(record, said, text, answer):
    made = reader()
    read = made.document(RawRecord("a:1", record))
    assert learned(read) == [answer] and (text or "") in read.text
    assert made.lines() == [f"read as {said}, 1 records"]


@pytest.mark.parametrize(
    ("record", "column"),
    [
        ({"text": "a", "weight": 0.5}, "weight"),
        ({"messages": [HI, HO], "system_prompts": "x", "label": 1}, "label"),
        ({"prompt": "a", "completion": "b", "label": False}, "label"),
        ({"text": "a", "messages": [HI, HO]}, "text"),
        ({"prompt": "a", "completion": "b", "response": "c"}, "response"),
        ({"messages": [HI, HO], "images": ["x"]}, "images"),
        ({"input_ids": [5, 6], "response_mask": [0, 1]}, "response_mask"),
        ({"input_ids": [5, 6], "loss_mask": [0, 1]}, "loss_mask"),
        ({"input_ids": [5, 6], "token_weights": [0, 1]}, "token_weights"),
        ({"input_ids": [5, 6], "document_ids": [0, 1]}, "document_ids"),
        ({"messages": [HI, HO], "completion_mask": [0, 1]}, "completion_mask"),
        ({"messages": [HI, HO], "assistant_masks": [0, 1]}, "assistant_masks"),
        ({"text": "a", "env_mask": [1]}, "env_mask"),
        ({"text": "a", "actionMask": [1]}, "actionMask"),
        ({"text": "a", "position_ids": [0]}, "position_ids"),
        ({"prompt": "a", "completion": "b", "lossWeight": 2}, "lossWeight"),
    ],
)
def test_columns_of_weights_and_roles_are_not_left_out(record, column):
    with pytest.raises(DataError, match=f'a.jsonl:1: .* do not use "{column}"; remove'):
        document(record)
    answers = {"chosen": "a", "rejected": "b"}
    if column not in ("text", "response", "images"):
        both = answers | {column: record[column]}
        with pytest.raises(DataError, match=f'of answers, which do not use "{column}"'):
            reader().answers(RawRecord("a:1", both))


@pytest.mark.parametrize("column", ["loss_mask", "response_mask", "sample_weight",
                                    "weight", "position_ids"])  # fmt: skip
def test_columns_of_prompts_that_say_what_is_learned(column):
    record = {"prompt": "hi", column: [1], "test_weights_of_gold": 3}
    with pytest.raises(DataError, match=f'"{column}"; remove it, name it in task.igno'):
        reader(section="task").prompt(RawRecord("a:1", record))
    _, others = reader(ignored=(column,)).prompt(RawRecord("a:1", record))
    assert others == {"test_weights_of_gold": 3}  # for reward functions


@pytest.mark.parametrize(
    ("column", "one", "packed"),
    [
        ("position_ids", [0, 1, 2], [0, 1, 0]),
        ("position_ids", [0, 1, 2], [1, 2, 3]),
        ("segment_ids", [1, 1, 1], [1, 1, 2]),
        ("seq_idx", [0, 0, 0], [0, 1, 1]),
        ("seq_lens", [3], [2, 1]),
        ("cu_seqlens", [0, 3], [0, 2, 3]),
    ],
)
def test_rows_of_several_documents_are_refused(column, one, packed):
    record = {"input_ids": [5, 6, 7]}
    assert document(record | {column: one}) == document(record)
    message = f"{column} must describe one document of 3 tokens, got .*; give each doc"
    with pytest.raises(DataError, match=message):
        document(record | {column: packed})


@pytest.mark.parametrize(
    ("mask", "positions"), [([1, 1, 0], [0, 1, 0]), ([0, 1, 1], [0, 0, 1])]
)
def test_padding_is_named_before_changed_positions(mask, positions):
    record = {"input_ids": [5, 6, 7], "attention_mask": mask, "position_ids": positions}
    with pytest.raises(DataError, match="a.jsonl:1: attention_mask must be 1 every"):
        document(record)


def test_all_masks_of_tokens_count_together():
    masks = {"completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]}
    assert document({"input_ids": [5, 6, 7]} | masks).labels == (6, -1, -1)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": [HI], "completion": [HI | {"content": "hm"}, HO]},
         r'"completion" begins with the role .user. and not with "prompt"; give'),
        ({"system": "a", "prompt": [{"role": "system", "content": "b"}, HI],
          "completion": "ho"}, '"system" and a message both have the role'),
        ({"instruction": "a", "output": "b", "history": [["c", None]]},
         '"history" must be a list of pairs .* a question and its answer'),
        ({"messages": [HI, {"role": "Assistant", "content": "ho"}]},
         r'"messages".1..role must be .assistant. .*, got .Assistant.; the known'),
        ({"messages": [HI, HO | {"content": "a\ufdd0b"}]}, "has U.FDD0 or U.FDD1"),
    ],
)  # fmt: skip
def test_text_written_twice_or_never_is_refused(record, message):
    with pytest.raises(DataError, match=f"a.jsonl:1: .*{message}"):
        document(record)


@pytest.mark.parametrize("role", ["bot", "model", "gpt", "Assistant"])
def test_assistant_by_another_name_is_refused(role):
    other = {"role": role, "content": "hm"}
    message = (
        rf'a\.jsonl:1: "messages"\[1\]\.role must be \'assistant\' for what the model '
        rf"writes, got '{role}'; the known roles are system, developer, user, assistant"
    )
    with pytest.raises(DataError, match=message):
        document({"messages": [HI, other, HI, HO]}, CHATML)


def test_messages_of_unknown_roles_are_said_once():
    made = reader(CHATML)
    other = {"role": "narrator", "content": "Night falls."}
    tool = {"role": "ipython", "content": "3"}
    for line in (1, 2):
        turns = [HI, other, HO, other, tool, HO]
        made.document(RawRecord(f"a:{line}", {"messages": turns}))
    assert made.lines()[1:] == [
        "the loss does not count messages of the role 'narrator', which is none of "
        "system, developer, user, assistant, tool, function, ipython, environment, "
        "observation; messages: 4 (first a:1)"
    ]


def test_texts_with_tools_or_variables_are_rendered():
    texts = {"prompt": "hi", "completion": "ho"}
    for more in (
        {"tools": [TOOL]},
        {"chat_template_kwargs": {"enable_thinking": True}},
    ):
        given = {"messages": [HI, HO]} | more
        actual, expected = document(texts | more), document(given)
        assert actual.text == expected.text and learned(actual) == learned(expected)
        asked = reader().prompt(RawRecord("a:1", {"prompt": "hi"} | more))[0]
        assert asked.rendered and asked.text.endswith("<|im_start|>assistant\n")
        both = {"prompt": "hi", "chosen": "ho", "rejected": "no"} | more
        assert reader().answers(RawRecord("a:1", both))[0].text == expected.text
    for nothing in ([], "", "[]", "null"):
        assert document(texts | {"tools": nothing}).prompt == "hi"
    repeated = {"prompt": "hi ", "chosen": "hi ho", "rejected": "hi no"}
    answers = reader().answers(RawRecord("a:1", repeated | {"tools": [TOOL]}))
    assert list(map(learned, answers)) == [["ho<|im_end|>"], ["no<|im_end|>"]]


def test_answer_may_repeat_its_prompt():
    repeats = document({"system": "S", "prompt": "hi", "completion": [HI, HO, HI, HO]})
    assert repeats.text == document({"system": "S", "messages": [HI, HO, HI, HO]}).text
    assert learned(repeats) == ["ho<|im_end|>"] * 2


def test_other_columns_are_said_once():
    made = reader()
    for i in range(2):
        made.document(RawRecord(f"a:{i}", {"text": "b", "stars": 5, "id": i}))
    assert made.lines() == [
        "read as texts, 2 records", "the column 'stars' is not used: 2 (first a:0)"
    ]  # fmt: skip


def test_prompt_beside_messages_begins_them():
    with pytest.raises(DataError, match='messages do not begin with "prompt"; remove'):
        document({"prompt": "other", "messages": [HI, HO]})


def test_tokens_and_their_labels(tokenizer):
    record = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "attention_mask": [1] * 3}
    made = document(record)
    ((tokens, labels),) = encoding.encode_documents([made], tokenizer)
    np.testing.assert_array_equal(tokens, [5, 6, 7])
    np.testing.assert_array_equal(labels, [6, 7, -1])
    made = document({"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]})
    assert made.labels == (-1, 7, -1)
    for wrong, message in (
        (
            {"input_ids": [5, 6], "labels": [6, -100]},
            r"labels\[0\] must be input_ids\[",
        ),
        ({"input_ids": [5, 6], "labels": [5]}, '"labels" must be a list of 2 integers'),
        (
            {"input_ids": [5], "attention_mask": [0]},
            "attention_mask must be 1 everywhe",
        ),
        ({"input_ids": "5"}, '"input_ids" must be a list of integers'),
        (
            {"input_ids": [5, 6], "completion_mask": [0, 2]},
            r':1: "completion_mask" must be 0 or 1 for each token, got \[0, 2\]',
        ),
    ):
        with pytest.raises(DataError, match=message):
            document(wrong)
    with pytest.raises(DataError, match="input_ids has 99999, but the vocabulary"):
        list(encoding.encode_documents([document({"input_ids": [99999]})], tokenizer))


# ---------------------------------------------------------------------- pairs


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "hi", "chosen": [HI, HO], "rejected": [HI, HO | {"content": "no"}]},
        {"prompt": [HI], "chosen": [HI, HO], "rejected": [HI, HO | {"content": "no"}]},
        {"prompt": [HI], "chosen": [HO], "rejected": [HO | {"content": "no"}]},
        {"prompt": [HI], "chosen": "ho", "rejected": "no"},
        {"chosen": [HI, HO], "rejected": [HI, HO | {"content": "no"}]},
        {"conversations": [{"from": "human", "value": "hi"}],
         "chosen": {"from": "gpt", "value": "ho"},
         "rejected": {"from": "gpt", "value": "no"}},
    ],
)  # fmt: skip
def test_every_form_of_pairs_has_its_prompt_once(record):
    both = reader().answers(RawRecord("a:1", record))
    assert [made.text.count("<|im_start|>user\nhi<|im_end|>") for made in both] == [
        1,
        1,
    ]
    assert list(map(learned, both)) == [["ho<|im_end|>"], ["no<|im_end|>"]]


def test_prompt_of_a_pair_in_other_columns():
    record = {"system": "S", "question": "hi", "chosen": "ho", "rejected": "no"}
    both = reader().answers(RawRecord("a:1", record))
    assert all("system\nS<|im_end|>" in made.text for made in both)
    assert all("user\nhi<|im_end|>" in made.text for made in both)
    both = reader().answers(RawRecord("a:1", record | {"system": None}))
    assert [made[1:3] for made in both] == [("ho", "hi"), ("no", "hi")]
    with pytest.raises(DataError, match='do not use "label"'):
        reader().answers(RawRecord("a:1", record | {"label": 1}))
    repeated = {"prompt": "q ", "chosen": "q a", "rejected": "q b"}
    read = reader()
    both = read.answers(RawRecord("a:1", repeated))
    assert [made[1:3] for made in both] == [("a", "q "), ("b", "q ")]
    assert read.lines()[1:] == [
        "both answers begin with the prompt, which jaxmem removes from them: 1 (first "
        "a:1)"
    ]
    for chosen, rejected, message in (
        ([HI | {"content": "hi "}, HO], [HI, HO], '"chosen" begins with the role'),
        (
            [HI, HO],
            [HI, HO, HI, HO],
            "chosen and rejected are equal, or one is the beginning",
        ),
    ):
        record = {"prompt": "hi", "chosen": chosen, "rejected": rejected}
        with pytest.raises(DataError, match=f"a:1: .*{message}"):
            reader().answers(RawRecord("a:1", record))


# -------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    ("record", "text", "columns"),
    [
        ({"prompt": "hi", "answer": "4"}, "hi", {"answer": "4"}),
        ({"question": "hi", "answer": "4"}, "hi", {"answer": "4"}),
        ({"messages": [HI, HO]}, "user\nhi<|im_end|>\n<|im_start|>assistant\n", {}),
        ({"instruction": "hi", "output": "x"}, "user\nhi<|im_end|>", {"output": "x"}),
        ({"prompt": [HI], "tools": [TOOL], "a": None}, json.dumps(TOOL), {"a": None}),
    ],
)
def test_prompts_of_every_form(record, text, columns):
    asked, others = reader().prompt(RawRecord("a:1", record))
    assert text in asked.text and "ho" not in asked.text and others == columns


def test_variables_of_the_template():
    made = ChatTemplate(TOOLS, NAMED, "t", SPECIAL, {"enable_thinking": False})
    asked, _ = RecordReader(lambda: made).prompt(RawRecord("a:1", {"prompt": [HI]}))
    assert asked.text.endswith("assistant\n<think></think>")
    own = {"prompt": [HI], "chat_template_kwargs": {"enable_thinking": False}}
    assert reader().prompt(RawRecord("a:1", own))[0].text == asked.text
    with pytest.raises(DataError, match="t: .*: the template does not read the"
                       " variable 'thinking'; it reads enable_thinking"):  # fmt: skip
        ChatTemplate(TOOLS, NAMED, "t", SPECIAL, {"thinking": False})


# ------------------------------------------------------------ rendered already


def test_text_that_has_its_edges_gets_no_others(tokenizer):
    from tests.helpers.templates import with_edges

    edges = with_edges(tokenizer)
    start, end = (tokenizer.token_to_id(w) for w in ("<s>", "</s>"))
    for text in ("Hi", "<s>Hi", "Hi</s>", "<s>Hi</s>", "<s>Hi</s>\n", "Hi<|eot|>"):
        ((tokens, _),) = encoding.encode_documents([document({"text": text})], edges)
        assert list(tokens).count(start) == 1 and tokens[0] == start
        assert list(tokens).count(end) == ("<|eot|>" not in text)


# ---------------------------------------------------------------------- files


def test_arrays_and_compressed_files_equal_lines(tmp_path):
    rows = [{"text": "a\u2028"}, {"text": "b"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    for name, content in {
        "a.jsonl": lines,
        "a.json": json.dumps(rows, indent=1).encode(),
        "lines.json": lines,
        "array.jsonl": json.dumps(rows).encode(),
        "named.json": json.dumps({"version": 1, "data": rows}).encode(),
        "a.jsonl.gz": gzip.compress(lines),
        "a.json.gz": gzip.compress(json.dumps(rows).encode()),
    }.items():
        (tmp_path / name).write_bytes(content)
        read = load_documents(str(tmp_path / name))
        assert [made.text for made in read] == ["a\u2028", "b"], name
    for i, record in enumerate((
        {"instruction": "a", "history": []}, {"text": "a", "tags": []},
        {"messages": [HI, HO], "tools": [TOOL]}, {"data": [{"text": "a"}], "meta": []},
        {"conversations": [{"text": "a"}], "prompt": "a", "tools": None},
    )):  # fmt: skip
        (tmp_path / "one.json").write_text(json.dumps(record))
        (read,) = read_records(tmp_path / "one.json", "data.source")
        assert read.fields == (record if i < 3 else {"text": "a"})
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(lines)[:20])
    with pytest.raises(DataError, match=r"data.source: cannot read .*cut\.jsonl\.gz: "):
        load_documents(str(tmp_path / "cut.jsonl.gz"))
    (tmp_path / "latin.jsonl.gz").write_bytes(gzip.compress(b'{"text": "\xe9"}'))
    with pytest.raises(DataError, match=r"latin\.jsonl\.gz:1: not UTF-8 text .byte 10"):
        load_documents(str(tmp_path / "latin.jsonl.gz"))
    (tmp_path / "bad.json").write_text('[{"text": "a"}, 5]')
    with pytest.raises(DataError, match=r"bad\.json: record 2: expected an object, go"):
        list(read_records(tmp_path / "bad.json", "data.source"))


@pytest.mark.parametrize("count", [2, 3, 16])
@pytest.mark.parametrize("held_out", [0.001, 0.05, 0.5])
def test_held_out_part_is_not_empty(count, held_out):
    keys = [bytes([i]) for i in range(count)]
    training, evaluation = split(keys, keys, held_out)
    assert training and evaluation and sorted(training + evaluation) == keys
    assert split(keys, [b"same"] * count, held_out) == (keys, [])


def test_pairs_of_a_file_are_held_out(tokenizer, tmp_path):
    from tests.helpers.templates import with_edges

    rows = [{"prompt": "a", "chosen": "b", "rejected": f"c{i}"} for i in range(4)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    config = pairs.DataConfig(source=str(tmp_path / "a.json"), held_out=0.01)
    training, held_out = pairs.load_pairs(config, with_edges(tokenizer))
    assert (len(training), len(held_out)) == (3, 1)


def test_pairs_that_memory_cannot_hold_are_named(tokenizer, tmp_path, monkeypatch):
    def full(*_):
        raise MemoryError

    (tmp_path / "a.jsonl").write_text('{"chosen": "b", "rejected": "c"}')
    monkeypatch.setattr(RecordReader, "answers", full)
    config = pairs.DataConfig(source=str(tmp_path / "a.jsonl"))
    message = "data.source: the host's memory cannot hold .*a.jsonl'?; name files of "
    with pytest.raises(DataError, match=message + "fewer records$"):
        pairs.load_pairs(config, tokenizer)


def test_raising_template_is_named_with_record():
    with pytest.raises(
        DataError, match=r"a\.jsonl:1: the chat template says: roles mu"
    ):
        document({"messages": [HO, HI, HO]}, LLAMA2)
