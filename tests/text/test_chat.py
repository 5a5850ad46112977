"""Messages to text through the model's own template."""

from pathlib import Path
from typing import Any

import pytest

from foreword.base.errors import RequestError
from foreword.text.chat import chat_text, for_template
from foreword.text.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def test_the_template_of_the_model_is_used(tokenizer: Tokenizer) -> None:
    text = chat_text(tokenizer, [{"role": "system", "content": "Be brief."}, *HELLO])
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_a_longer_conversation_starts_with_the_shorter_one(tokenizer: Tokenizer) -> None:
    short = chat_text(tokenizer, HELLO)
    longer = chat_text(tokenizer, [*HELLO, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "?"}])
    assert longer.startswith(short)


def test_what_templates_get() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answer = {"role": "assistant", "content": "Hi", "tool_calls": [], "name": None}
    assert for_template([{"role": "developer", "content": parts}, answer]) == (
        {"role": "system", "content": "one\ntwo"},
        {"role": "assistant", "content": "Hi"},
    )


@pytest.mark.parametrize("messages", [[], "hello", HELLO[0], None, 5], ids=str)
def test_no_messages(messages: Any) -> None:
    with pytest.raises(RequestError, match="messages is") as caught:
        for_template(messages)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("message", "field", "text"),
    [
        ({"content": "x"}, "role", "missing"),
        ({"role": "user"}, "content", "missing"),
        ({"role": "user", "content": None}, "content", "must be a string"),
        ({"role": "user", "content": []}, "content", "parts of type 'text'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "content", "parts of type 'text'"),
        (
            {"role": 3, "content": "x"},
            "role",
            "role is int: input should be 'system', 'developer', 'user', 'assistant' or",
        ),
        (
            {"role": "usr", "content": "x"},
            "role",
            "role is 'usr': input should be 'system', 'developer', 'user', 'assistant' or",
        ),
        ({"role": ["user"], "content": "x"}, "role", "role is list"),
        ({"role": "user", "content": "x", "name": "Al"}, "name", "not supported"),
        ({"role": "user", "content": "x", "mood": "good"}, "mood", "unknown field"),
        ("hello", "", "must be an object"),
    ],
    ids=str,
)
def test_a_wrong_message_is_named(message: Any, field: str, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        for_template([*HELLO, message])
    assert caught.value.field == f"messages.1.{field}".rstrip(".")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content + 1 }}", "messages do not fit"),
        ("{% for", "messages do not fit"),
    ],
)
def test_a_template_that_refuses(embedded_directory: Path, tmp_path: Path, template: str, message: str) -> None:
    tokenizer = with_template(embedded_directory, tmp_path, template)
    with pytest.raises(RequestError, match=message) as caught:
        chat_text(tokenizer, HELLO)
    assert caught.value.field == "messages"


def test_a_model_without_template(embedded_directory: Path, tmp_path: Path) -> None:
    tokenizer = with_template(embedded_directory, tmp_path, None)
    with pytest.raises(RequestError, match="no chat template") as caught:
        chat_text(tokenizer, HELLO)
    assert caught.value.field == "messages"


def with_template(source: Path, target: Path, template: str | None) -> Tokenizer:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    if template is not None:
        (target / "chat_template.jinja").write_text(template)
    return Tokenizer(target)
