"""Records what transformers' `apply_chat_template` makes of conversations.

Run with transformers (5.24 wrote what is committed), from the repository:

    python -m tests.data.make_renderings
    python -m tests.data.make_renderings OTHER_TEMPLATES OUT.json

The first writes renderings.json from templates/, which are written for these tests in
the formats of the families that they are named after. The second does the same with a
directory of templates that are not carried here; `tests.data.test_renderings` compares
its result as well.

A conversation is recorded in each form that a template may take: content as texts or as
parts, arguments of calls as objects or as JSON, no content as null or as an empty text.
"""

import copy
import hashlib
import itertools
import json
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
TODAY = 2026, 5, 3  # of templates that write the date
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says how warm it is.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(arguments, number=1):
    function = {"name": "weather", "arguments": arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def answer(content, number=1):
    more = {"tool_call_id": f"call0000{number}", "name": "weather"}
    return {"role": "tool", "content": content, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
ARGUMENTS = {"city": "Zürich", "days": 2}
ASKED = user("How warm is it?")
CALLED = [ASKED, assistant(None, tool_calls=[call(ARGUMENTS)]), answer("21")]
CASES = {
    "one turn": {"messages": [user("Hi"), assistant("Hello.")]},
    "system": {"messages": [SYSTEM, user("Hi"), assistant("Hello.")]},
    "two turns": {
        "messages": [user("a"), assistant("b"), user("c"), assistant("d")],
    },
    "unicode and spaces": {
        "messages": [user("  ÄÖ 日本 🙂\n"), assistant("a \u2028 b\n\n  c")],
    },
    "parts": {
        "messages": [
            user([{"type": "text", "text": "Is it "}, {"type": "text", "text": "on?"}]),
            assistant([{"type": "text", "text": "Yes."}]),
        ]
    },
    "tools, uncalled": {"messages": [user("Hi"), assistant("Hello.")], "tools": [TOOL]},
    "a call and its answer": {
        "messages": [*CALLED, assistant("21 degrees.")], "tools": [TOOL],
    },
    "a call with words": {
        "messages": [
            ASKED, assistant("I look.", tool_calls=[call(ARGUMENTS)]), answer("21"),
            assistant("21 degrees."),
        ],
        "tools": [TOOL],
    },
    "two calls": {
        "messages": [
            ASKED,
            assistant(None, tool_calls=[call({"city": "A"}), call({"city": "B"}, 2)]),
            answer("1"), answer("2", 2), assistant("1 and 2."),
        ],
        "tools": [TOOL],
    },
    "nested arguments": {
        "messages": [
            ASKED,
            assistant(None, tool_calls=[call({"at": {"x": [1, 2.5], "y": "z"}})]),
            answer("{}"), assistant("Nothing."),
        ],
        "tools": [TOOL],
    },
    "reasoning": {
        "messages": [user("2+2?"), assistant("4", reasoning_content="Two and two.")],
    },
    "thinking": {"messages": [user("2+2?"), assistant("4", thinking="Two and two.")]},
    "earlier reasoning": {
        "messages": [
            user("2+2?"), assistant("4", reasoning_content="Two and two."),
            user("And 3?"), assistant("7", reasoning_content="Four and three."),
        ]
    },
}  # fmt: skip


def forms(messages):
    """The messages, in each of the forms."""
    for parts, as_json, empty in itertools.product(*[(None, True)] * 3):
        made = copy.deepcopy(messages)
        for turn in made:
            if parts is None and isinstance(turn.get("content"), list):
                turn["content"] = "".join(part["text"] for part in turn["content"])
            elif parts and isinstance(turn.get("content"), str):
                turn["content"] = [{"type": "text", "text": turn["content"]}]
            for called in turn.get("tool_calls", ()):
                if as_json:
                    given = called["function"]["arguments"]
                    dumped = json.dumps(given, ensure_ascii=False)
                    called["function"]["arguments"] = dumped
            if empty and turn.get("content", "") is None:
                turn["content"] = ""
        named = [("texts", "parts"), ("objects", "json"), ("null", "empty")]
        chosen = (bool(parts), bool(as_json), bool(empty))
        yield " ".join(x[y] for x, y in zip(named, chosen, strict=True)), made


def record(directory):
    """Renderings by template, case and form; equal ones once."""
    from transformers.utils import chat_template_utils as rendering

    class Day(rendering.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(*TODAY)

    rendering.datetime = Day
    made = {}
    for path in sorted(pathlib.Path(directory).glob("*.jinja")):
        template = path.read_text("utf-8")
        cases = {}
        for name, case in CASES.items():
            found = {}
            for form, messages in forms(case["messages"]):
                try:
                    (text,), _ = rendering.render_jinja_template(
                        [messages], chat_template=template, tools=case.get("tools"),
                        add_generation_prompt=False, **TOKENS,
                    )  # fmt: skip
                except Exception as error:
                    text = {"error": str(error)[:60]}
                if text not in found.values():
                    found[form] = text
            cases[name] = found
        digest = hashlib.sha256(template.encode()).hexdigest()
        made[path.stem] = {"sha256": digest, "cases": cases}
    return made


def main(directory=HERE / "templates", out=HERE / "renderings.json"):
    text = json.dumps(record(directory), indent=1, ensure_ascii=False)
    pathlib.Path(out).write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
