"""Tools, their calls and their results: checked, in the model's own template, in the order that they came in."""

import json
from pathlib import Path
from typing import Any

import pytest

from foreword.base.errors import RequestError
from foreword.text.chat import chat_text, for_template
from foreword.text.tokenizer import Tokenizer
from foreword.text.tools import tools_for_template
from tests.text.tooling import called, tokenizer_folder, tool

HELLO = {"role": "user", "content": "Hello"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "18 C"}
WEATHER = tool("weather", "How warm it is", city={"type": "string"})
TIME = tool("time", "What time it is")


@pytest.fixture
def tooled(embedded_directory: Path, tmp_path: Path) -> Tokenizer:
    return Tokenizer(tokenizer_folder(embedded_directory, tmp_path))


def test_a_template_gets_tools_and_calls_as_it_expects_them(tooled: Tokenizer) -> None:
    messages = for_template([HELLO, called("weather", '{"city": "Rome"}'), RESULT])
    assert messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
        ],
    }
    assert messages[2] == {"role": "tool", "content": "18 C", "tool_call_id": "call_1"}
    text = chat_text(tooled, messages, tools_for_template([WEATHER, TIME]))
    assert f"You may call:\n{json.dumps(WEATHER)}\n{json.dumps(TIME)}\n<|im_end|>" in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>' in text
    assert text.endswith("<|im_start|>tool\n18 C<|im_end|>\n<|im_start|>assistant\n")


def test_no_order_is_changed(tooled: Tokenizer) -> None:
    turned = {"function": dict(reversed(WEATHER["function"].items())), "type": "function"}
    assert turned == WEATHER
    texts = [
        chat_text(tooled, for_template([HELLO]), tools_for_template(tools))
        for tools in ([WEATHER, TIME], [TIME, WEATHER], [turned, TIME], [WEATHER, TIME])
    ]
    assert json.dumps(turned) in texts[2]
    assert texts[0] == texts[3]
    assert len(set(texts)) == 3
    written = chat_text(tooled, for_template([HELLO, called("f", '{"b": 1, "a": 2}')]))
    assert '{"b": 1, "a": 2}' in written


def test_no_tools_at_all(tooled: Tokenizer) -> None:
    assert [tools_for_template(none) for none in (None, [], ())] == [(), (), ()]
    assert "You may call" not in chat_text(tooled, for_template([HELLO]))


def test_a_template_that_writes_no_tools(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"template does not write them.*serve a model whose template") as caught:
        chat_text(tokenizer, for_template([HELLO]), tools_for_template([WEATHER]))
    assert caught.value.field == "tools"
    with pytest.raises(RequestError, match="template does not write them") as caught:
        chat_text(tokenizer, for_template([HELLO, called("weather", "{}"), RESULT]))
    assert caught.value.field == "messages.1.tool_calls"
    assert "18 C" in chat_text(tokenizer, for_template([HELLO, RESULT]))  # a message like any other there


def test_a_template_that_only_works_with_tools(embedded_directory: Path, tmp_path: Path) -> None:
    template = "{{ tools[0].function.name + messages[0].content }}"
    tooled = Tokenizer(tokenizer_folder(embedded_directory, tmp_path, template=template))
    assert chat_text(tooled, for_template([HELLO]), tools_for_template([WEATHER])) == "weatherHello"


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("tools", "field", "text"),
    [
        ("f", "tools", "must be a list"),
        ({"type": "function"}, "tools", "must be a list"),
        ([5], "tools.0", "an object with type and function"),
        ([{"function": {}}], "tools.0.type", "missing"),
        ([{"type": "function"}], "tools.0.function", "missing"),
        ([{"type": "web_search", "function": {}}], "tools.0.type", "'web_search'; it must be 'function'"),
        ([{"type": "function", "function": "f"}], "tools.0.function", "an object with name"),
        ([function(), {"type": "function", "function": {}}], "tools.1.function.name", "missing"),
        ([function(name="a b")], "tools.0.function.name", "letters, digits"),
        ([function(name="x" * 65)], "tools.0.function.name", "1 to 64"),
        ([function(name=None)], "tools.0.function.name", "is null"),
        ([function(description=5)], "tools.0.function.description", "a string"),
        ([function(parameters=[])], "tools.0.function.parameters", "JSON schema"),
        ([function(strict=True)], "tools.0.function.strict", "leave it out or send false"),
        ([function(paramters={})], "tools.0.function.paramters", "unknown field; known are name, description"),
        ([{**function(), "kind": 1}], "tools.0.kind", "unknown field"),
        ([function(parameters={"x": {1, 2}})], "tools.0.function", "cannot be written as JSON"),
        ([function(parameters={"x": float("nan")})], "tools.0.function", "cannot be written as JSON"),
    ],
    ids=str,
)
def test_a_wrong_tool_is_named(tools: Any, field: str, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        tools_for_template(tools)
    assert caught.value.field == field


def call(**fields: Any) -> dict[str, Any]:
    made = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **fields}
    return {"role": "assistant", "tool_calls": [made]}


@pytest.mark.parametrize(
    ("message", "field", "text"),
    [
        ({"role": "assistant", "content": None}, "content", "is null; it must be a string"),
        ({"role": "assistant", "tool_calls": []}, "content", "missing"),
        ({"role": "assistant", "content": "x", "tool_calls": "f"}, "tool_calls", "list of calls"),
        ({"role": "assistant", "tool_calls": [5]}, "tool_calls.0", "an object with id and function"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "tool_calls.0.function", "missing"),
        (call(id=""), "tool_calls.0.id", "at least one character"),
        (call(type="custom"), "tool_calls.0.type", "must be 'function'"),
        (call(function={"name": "", "arguments": "{}"}), "tool_calls.0.function.name", "at least one"),
        (call(function={"name": "f"}), "tool_calls.0.function.arguments", "missing"),
        (call(function={"name": "f", "arguments": "{"}), "tool_calls.0.function.arguments", "a JSON object"),
        (call(function={"name": "f", "arguments": "[]"}), "tool_calls.0.function.arguments", "a JSON object"),
        (call(index=0), "tool_calls.0.index", "unknown field; known are id, type, function"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "tool_calls", "message of role 'user'"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "tool_call_id", "message of role 'user'"),
        ({"role": "user", "content": "x", "reasoning_content": "y"}, "reasoning_content", "role 'user'"),
        ({"role": "assistant", "content": "x", "reasoning_content": 5}, "reasoning_content", "must be a string"),
        ({"role": "tool", "content": "x"}, "tool_call_id", "missing"),
        ({"role": "tool", "content": "x", "tool_call_id": ""}, "tool_call_id", "not empty"),
        ({"role": "tool", "content": None, "tool_call_id": "1"}, "content", "is null"),
        ({"role": "tool", "content": "x", "tool_call_id": "1", "name": 5}, "name", "must be a string"),
    ],
    ids=str,
)
def test_a_wrong_call_or_result_is_named(message: Any, field: str, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        for_template([HELLO, message])
    assert caught.value.field == f"messages.1.{field}"


def test_what_comes_back_as_it_was_sent() -> None:
    answer = {"role": "assistant", "content": "Hm.", "reasoning_content": "Rome?", "refusal": None, "tool_calls": None}
    assert for_template([answer]) == ({"role": "assistant", "content": "Hm.", "reasoning_content": "Rome?"},)
    result = {**RESULT, "name": "weather"}
    assert for_template([result]) == ({"role": "tool", "content": "18 C", "tool_call_id": "call_1", "name": "weather"},)
    parsed = {"id": "call_1", "function": {"name": "f", "arguments": {"a": [1, None]}}}  # from Python
    read = for_template([{"role": "assistant", "tool_calls": [parsed]}])
    assert read[0]["tool_calls"][0]["function"]["arguments"] == {"a": [1, None]}
