"""Chat templates: text and tokens as transformers makes them, and what is counted."""

import json
import re

import numpy as np
import pytest

from jaxmem.data import documents
from jaxmem.data.chat import ChatTemplate, read_template
from jaxmem.data.record_reader import RecordReader
from jaxmem.data.records import DataError, RawRecord
from jaxmem.data.rendering import Conversation, Renderer
from tests.helpers.templates import (
    CHATML,
    GEMMA,
    LLAMA2,
    LLAMA3,
    NAMED,
    SPECIAL,
    tokenizer as tokenizer,
    with_edges,
)

pytest.importorskip("jinja2")

TALK = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": " 4\nor so"},
]
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% elif m['role'] == 'assistant' %}"
    "{{ m['content'] + eos_token }}{% else %}{{ raise_exception('Only user and "
    "assistant roles are supported!') }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}"
    "{{ '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}"
    "{{ eos_token }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}\n{% if m['role'] == 'user' %}\n{{ '<|user|>\n' + "
    "m['content'] + eos_token }}\n{% else %}\n{{ '<|assistant|>\n'  + m['content'] + "
    "eos_token }}\n{% endif %}\n{% if loop.last and add_generation_prompt %}\n"
    "{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
# Thoughts are written in the last turn alone, so that no turn is a prefix of a later.
QWEN3 = (
    "{%- for m in messages %}\n    {%- set text = m.content.split('</think>')[-1]"
    ".lstrip('\n') %}\n    {{- '<|im_start|>' + m.role + '\n' }}\n"
    "    {%- if m.role == 'assistant' and loop.last %}\n"
    "        {{- '<think>\n\n</think>\n\n' }}\n    {%- endif %}\n"
    "    {{- text + '<|im_end|>\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\n' }}\n"
    "{%- endif %}"
)
COMMAND = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if not loop.first and m.content is none %}{% continue %}{% endif %}"
    "{{ '<|turn|>' }}{{ {'user': 'USER', 'assistant': 'BOT'}"
    "[m.role] | tojson }}{{ m.content.strip() + '<|/turn|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>\"BOT\"' }}{% endif %}"
)
SMOLLM3 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Each with what its turns wrote, and the whole text of the conversation.
TEMPLATES = {
    "chatml": (CHATML, ["Hello.<|im_end|>", " 4\nor so<|im_end|>"]),
    "llama2": (LLAMA2, [" Hello. </s>", " 4\nor so </s>"]),
    "llama3": (LLAMA3, ["Hello.<|eot|>", "4\nor so<|eot|>"]),
    "gemma": (GEMMA, ["Hello.<end_of_turn>", "4\nor so<end_of_turn>"]),
    "mistral": (MISTRAL, ["Hello.</s>", " 4\nor so</s>"]),
    "phi3": (PHI3, ["Hello.<|end|>", " 4\nor so<|end|>"]),
    "zephyr": (ZEPHYR, ["Hello.</s>", " 4\nor so</s>"]),
    "qwen3": (
        QWEN3,
        ["Hello.<|im_end|>", "<think>\n\n</think>\n\n 4\nor so<|im_end|>"],
    ),
    "command": (COMMAND, ["Hello.<|/turn|>", "4\nor so<|/turn|>"]),
    "smollm3": (SMOLLM3, ["Hello.<|im_end|>", " 4\nor so<|im_end|>"]),
}
WRITTEN_DOWN = {
    "llama3": "<s><|start|>user<|sep|>\n\nHi there<|eot|><|start|>assistant<|sep|>\n\n"
    "Hello.<|eot|><|start|>user<|sep|>\n\n2+2?<|eot|><|start|>assistant<|sep|>\n\n"
    "4\nor so<|eot|>",
    "zephyr": "<|user|>\nHi there</s>\n<|assistant|>\nHello.</s>\n<|user|>\n2+2?</s>\n"
    "<|assistant|>\n 4\nor so</s>\n",
    "command": '<s><|turn|>"USER"Hi there<|/turn|><|turn|>"BOT"Hello.<|/turn|>'
    '<|turn|>"USER"2+2?<|/turn|><|turn|>"BOT"4\nor so<|/turn|>',
}


def template(name):
    return ChatTemplate(TEMPLATES[name][0], NAMED, name, SPECIAL)


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_tokens_are_transformers(name, tokenizer):
    made = rendered(name)
    if name in WRITTEN_DOWN:
        assert made == WRITTEN_DOWN[name]
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=TEMPLATES[name][0], **NAMED
    )
    assert made == theirs.apply_chat_template(TALK, tokenize=False)
    prompt = Renderer(lambda: template(name)).prompt(Conversation(TALK[:1]), "")
    assert prompt == theirs.apply_chat_template(
        TALK[:1], tokenize=False, add_generation_prompt=True
    )
    ids = theirs.apply_chat_template(TALK, return_dict=False)
    assert tokenizer.encode(made, add_special_tokens=False).ids == ids
    if "generation %}" in TEMPLATES[name][0]:
        found = theirs.apply_chat_template(
            TALK, return_assistant_tokens_mask=True, return_dict=True
        )
        labels = labels_of(name, tokenizer)
        np.testing.assert_array_equal(labels[:-1] >= 0, found["assistant_masks"][1:])


def rendered(name):
    return counted_of(name).text


def counted_of(name, first=0):
    """The text that the loss counts from message `first` on."""
    turns = frozenset(i for i in (1, 3) if i >= first)
    return Renderer(lambda: template(name)).counted(Conversation(TALK, turns), "")


def labels_of(name, tokenizer):
    text, counted = counted_of(name)
    document = documents.Document("", text, counted=counted)
    ((tokens, labels),) = documents.encode_documents([document], with_edges(tokenizer))
    np.testing.assert_array_equal(tokens, tokenizer.encode(text).ids)
    live = labels >= 0
    np.testing.assert_array_equal(labels[live], np.append(tokens[1:], -1)[live])
    return labels


@pytest.mark.parametrize("name", TEMPLATES)
def test_loss_counts_assistant_turns_alone(name, tokenizer):
    text, counted = counted_of(name)
    assert [text[a:b] for a, b in counted] == TEMPLATES[name][1]
    labels = labels_of(name, tokenizer)
    ids = [int(i) for i in labels[labels >= 0]]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "".join(
        TEMPLATES[name][1]
    )
    (last,) = counted_of(name, first=2).counted
    assert last == counted[1]


def test_call_of_a_tool_is_counted_whole():
    text = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') "
        "+ (m.tool_calls | tojson if m.tool_calls else '') + '<|im_end|>' }}"
        "{% endfor %}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "é"}]}
    renderer = Renderer(lambda: ChatTemplate(text, {}, "", ["<|im_end|>"]))
    made = renderer.counted(Conversation([TALK[0], call], frozenset([1])), "")
    ((a, b),) = made.counted
    assert made.text[a:b] == '[{"name": "é"}]<|im_end|>'


# --------------------------------------------------------------------- files


def checkpoint(tmp_path, value=None, text=None):
    config = {"bos_token": {"content": "<s>"}, "chat_template": value}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if text is not None:
        (tmp_path / "chat_template.jinja").write_text(text)
    return tmp_path


def test_template_is_where_checkpoints_have_it(tmp_path):
    listed = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "a"},
    ]
    for value in ("a", listed):
        assert read_template(checkpoint(tmp_path, value), None).render(TALK) == "a"
    made = read_template(checkpoint(tmp_path, "a", "{{ bos_token }}"), None)
    assert made.render(TALK) == "<s>"
    (tmp_path / "own.jinja").write_text("own")
    made = read_template(tmp_path, str(tmp_path / "own.jinja"))
    assert made.render(TALK) == "own"


TOOL = {"type": "function", "function": {"name": "sky", "description": "Its color."}}
WITH_TOOLS = "{% for t in tools %}{{ t | tojson }}{% endfor %}" + CHATML


def render_with_tools(template, tools):
    reader = RecordReader(lambda: template)
    record = {"messages": TALK} | ({"tools": tools} if tools else {})
    return reader.document(RawRecord("a:1", record)).text


@pytest.mark.parametrize("place", ["tokenizer_config.json", "additional"])
def test_tool_template_renders_conversations(place, tmp_path):
    if place == "additional":
        checkpoint(tmp_path, "no", CHATML)
        (tmp_path / "additional_chat_templates").mkdir()
        more = tmp_path / "additional_chat_templates" / "tool_use.jinja"
        more.write_text(WITH_TOOLS)
    else:
        listed = {"default": CHATML, "tool_use": WITH_TOOLS, "rag": "no"}.items()
        checkpoint(tmp_path, [{"name": k, "template": v} for k, v in listed])
    template = read_template(tmp_path, None)
    plain = render_with_tools(template, [])
    assert plain == template.render(TALK) and plain.startswith("<|im_start|>user")
    assert render_with_tools(template, [TOOL]) == json.dumps(TOOL) + plain
    # A template that is named renders everything.
    (tmp_path / "own.jinja").write_text(CHATML)
    own = read_template(tmp_path, str(tmp_path / "own.jinja"))
    with pytest.raises(documents.DataError, match=r"leaves out tools.*now .*own.jinja"):
        render_with_tools(own, [TOOL])


def test_template_that_leaves_out_tools_is_named(tmp_path):
    listed = [{"name": k, "template": CHATML} for k in ("default", "rag")]
    template = read_template(checkpoint(tmp_path, listed), None)
    message = r"tools; .*now .*tokenizer_config.json: chat_template 'default'\)"
    with pytest.raises(documents.DataError, match=message):
        render_with_tools(template, [TOOL])
    listed = [{"name": "rag", "template": CHATML}]
    with pytest.raises(documents.DataError, match="templates 'rag', but none is"):
        read_template(checkpoint(tmp_path, listed), None)


def test_template_of_tools_says_itself_what_counts(tmp_path):
    marks = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.role }}:"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %};{% endfor %}"
    )
    listed = {"default": CHATML, "tool_use": marks}.items()
    listed = [{"name": k, "template": v} for k, v in listed]
    template = read_template(checkpoint(tmp_path, listed), None)
    record = {"messages": TALK[:2], "tools": [TOOL]}
    made = RecordReader(lambda: template).document(RawRecord("a:1", record))
    assert [made.text[a:b] for a, b in made.counted] == ["Hello."]


def test_missing_template_is_named(tmp_path):
    with pytest.raises(
        documents.DataError, match=r"or data.chat_template=FILE.jinja to"
    ):
        read_template(checkpoint(tmp_path), None)
    with pytest.raises(
        documents.DataError, match=r"own\.jinja: cannot be read: No such f"
    ):
        read_template(tmp_path, str(tmp_path / "own.jinja"))
    with pytest.raises(
        documents.DataError, match=r"\.jinja: unexpected 'end .*\(line 1\)"
    ):
        read_template(checkpoint(tmp_path, "a", "{% if"), None)


def test_sandbox_refuses_what_is_not_rendering():
    made = ChatTemplate("{{ ''.__class__.__mro__ }}", {}, "")
    with pytest.raises(documents.DataError, match="the chat template says: .*unsafe"):
        made.render(TALK)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": []}, '"messages" must be a list of messages, got []'),
        ({"messages": ["hi"]}, '"messages"[0] must be an object with "role" and'),
        ({"messages": TALK[:1]}, "no message has the role 'assistant'"),
        ({"messages": TALK[1:]}, "the chat template says: roles must alternate user"),
        ({"messages": TALK, "text": "a"}, 'conversations, which do not use "text"; re'),
        ({"chosen": "a", "rejected": "b"}, "are for run.job='dpo'"),
    ],
)
def test_line_that_cannot_be_rendered_is_named(record, message, tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n" + json.dumps(record))
    with pytest.raises(documents.DataError) as raised:
        documents.load_documents(
            str(path), reader=RecordReader(lambda: template("llama2"))
        )
    said = str(raised.value)
    assert said.startswith(f"{path}:2: ") and message in said and "\n" not in said


def test_messages_without_a_checkpoint_are_refused(tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": TALK}))
    with pytest.raises(
        documents.DataError, match=r"talk\.jsonl:1: .* set model.checkpoint"
    ):
        documents.load_documents(str(path))


NESTED = (
    "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}"
)


@pytest.mark.full
def test_loop_without_end_is_an_error(tmp_path):
    template = ChatTemplate(NESTED, {}, "t")
    with pytest.raises(ValueError, match="its loops take more than 1,000,000 turns"):
        template.render(TALK)
    many = ChatTemplate("{% for a in range(99999) %}{% endfor %}ok", {}, "t")
    assert [many.render(TALK) for _ in range(12)] == 12 * ["ok"]
    left = "{% for a in [0, 1, 2] %}{{ a }}{% if a %}{% break %}{% endif %}{% endfor %}"
    assert ChatTemplate(left, {}, "t").render(TALK) == "01"
    told = "{% for a in messages %}{{ loop.last }}{{ loop.length }}{% endfor %}"
    assert ChatTemplate(told, {}, "t").render(TALK[:2]) == "False2True2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ lipsum(n=10**8) }}", "'lipsum' is undefined"),
        ("{{ 'a b'|wordwrap(1) }}", "No filter named 'wordwrap'"),
        ("{{ 'a b'|urlize }}", "No filter named 'urlize'"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}"
            "{% endmacro %}{{ f(60) }}",
            "it takes more than 0.2 seconds",
        ),
    ],
)
def test_templates_without_an_end_are_ended(text, message, monkeypatch):
    monkeypatch.setattr("jaxmem.data.rendering_budget._MOST_SECONDS", 0.2)
    with pytest.raises(DataError, match=re.escape(message)) as raised:
        ChatTemplate(text, {}, "t").render([{"role": "user", "content": "a"}])
    assert "\n" not in str(raised.value)


# Each makes about a million characters or entries at once, or as many in small pieces.
BEYOND = [
    "'x' * 2**20",
    "[1] * 2**20",
    "'%1048576s' % 'x'",
    "'%(a)1048576s' % {'a': 1}",
    "'%*d' % (2**20, 1)",
    "'%.1048576f' % 1",
    "('%s' * 2000) % ((['x' * 999],) * 2000)",
    "'%1048576s'|format('x')",
    "'{:1048576}'.format('x')",
    "'{:{}}'.format('x', 2**20)",
    "'{:{}{}}'.format('x', 104, 8576)",
    "'{a:1048576}'.format_map({'a': 1})",
    "('{0}' * 2000).format('x' * 999)",
    "'x'|center(2**20)",
    "'x'|center(width=2**20)",
    "['x']|map('center', 2**20)|list",
    "'x\ny'|indent(2**20)",
    "'x'.ljust(2**20)",
    "'x'.zfill(2**20)",
    "range(2000)|join('x' * 999)",
    "('x' * 999).join([''] * 2000)",
    "('x' * 2000)|replace('x', 'y' * 999)",
    "('x' * 2000).replace('x', 'y' * 999)",
    "'x'|batch(2**20, 'y')|list",
    "'x'|slice(2**20)|list",
    "([range(2000)|list] * 999)|sum(start=[])",
    "[1]|tojson(indent=2**20)",
    "['x' * 999, 'y' * 999]|tojson(separators=('x' * 2**15, ':'))",
    "strftime_now('x' * 2**15)",
]
GROWING = [
    "{% for _ in range(2000) %}{{ 'x' * 999 }}{% endfor %}",
    "{% for _ in range(2000) %}" + "x" * 999 + "{% endfor %}",
    "{% set n = namespace(x='x') %}"
    "{% for _ in range(20) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x=1) %}"
    "{% for _ in range(20) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=1) %}"
    "{% for _ in range(20) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ '%s' % n.x }}",
    "{% set n = namespace(x=(1,)) %}"
    "{% for _ in range(20) %}{% set n.x = (n.x, n.x) %}{% endfor %}{{ {}[n.x] + 1 }}",
    "{% set n = namespace(x=[]) %}{% set s = 'x' * 999 %}"
    "{% for _ in range(2000) %}{% set n.x = [n.x, s[1:]] %}{% endfor %}",
    "{% set n = namespace(x=[]) %}{% set s = 'x' * 999 %}"
    "{% for _ in range(2000) %}{% set n.x = [n.x, s.upper()] %}{% endfor %}",
    "{% filter center(2**20) %}x{% endfilter %}",
    "{% macro m() %}{% for _ in range(2000) %}{{ 'x' * 999 }}{% endfor %}{% endmacro %}"
    "{{ m() }}",
]


@pytest.mark.parametrize(
    "text", [f"{{% set x = {expression} %}}" for expression in BEYOND] + GROWING
)
def test_no_rendering_makes_texts_without_a_bound(text, monkeypatch):
    monkeypatch.setattr("jaxmem.data.rendering_budget._MOST_CHARACTERS", 2**17)
    with pytest.raises(
        DataError, match="^t: it makes texts longer than 131,072 characters"
    ):
        ChatTemplate(text, {}, "t").render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    "expression", ["10 ** 99999", "1|round(99999, 'ceil')", "('f' * 9999)|int(base=16)"]
)
def test_no_rendering_makes_numbers_without_a_bound(expression):
    with pytest.raises(
        DataError, match="^t: it makes a number of more than 16,384 bit"
    ):
        ChatTemplate(f"{{% set x = {expression} %}}", {}, "t").render(TALK)


@pytest.mark.parametrize("value", ["a\nb", 1, 1.0, ["a", "b"], ("a",), {"a": "b"}])
@pytest.mark.parametrize("arguments", ["2**20", "2**20, 'y'", "'y', 2**20", "'y'*9999"])
def test_filters_and_methods_bound_their_texts(value, arguments, monkeypatch):
    """Also those that a later version of Python or jinja2 adds."""
    monkeypatch.setattr("jaxmem.data.rendering_budget._MOST_CHARACTERS", 2**17)
    from jaxmem.data.template_sandbox import bounded_environment

    environment = bounded_environment(("", ""))
    methods = [f".{name}" for name in dir(value) if not name.startswith("_")]
    for operation in methods + [f"|{name}" for name in environment.filters]:
        text = f"{{% set made = value{operation}({arguments}) %}}{{{{ made|string }}}}"
        try:
            made = environment.from_string(text).render(value=value)
        except Exception:  # most do not take such arguments
            continue
        assert len(made) <= 2**17, operation


def test_bounded_operations_are_those_of_jinja():
    text = (
        "{{ none ~ 1 ~ 'b' ~ true }} {{ [1, 'a']|join('-') }} "
        "{{ '-'.join(['a', 'b']) }} {{ 'aa'|replace('a', 'b', 1) }} "
        "{{ 'a'|center(3) }} {{ 2 * 'a' + 'c' }}"
        " {{ messages|join(',', 'role') }} {{ 2 ** 3 }} {{ nothing ~ 'x' }}"
        " {{ '%02d|%s|%5.1f' % (7, 'a', 2) }} {{ '%s-%s'|format('a', 1) }} {{ 5 % 2 }}"
        " {{ '{:>3}{b!r:{w}}'.format('a', b='c', w=4) }} {{ 'a\nb'|indent(2) }}"
        " {{ '{a}'.format_map({'a': 1}) }} {{ ('<%s'|escape) % '>' }} {{ 'abc'[1:] }}"
        " {{ ['a', 'b']|map('upper')|join }} {{ [1, 2]|sum }} "
        "{{ [[1], [2]]|sum(start=[]) }}"
        " {{ {'a': [1]}|tojson }} {{ [1]|tojson(indent=1) }} {{ 'a' is upper }}"
        " {% filter upper %}a{% endfilter %} {{ (1, 2) }} {{ 2.5|round|int }}"
    )
    made = ChatTemplate(text, {}, "t").render([{"role": "user", "content": "a"}])
    assert made == (
        "None1bTrue 1-a a-b ba  a  aac user 8 x 07|a|  2.0 a-1 1   a'c'  a\n  b 1 "
        '&lt;&gt; bc AB 3 [1, 2] {"a": [1]} [\n 1\n] False A (1, 2) 2'
    )
