"""Messages to text through the model's own template."""

from pathlib import Path
from typing import Any

import pytest

from foreword.base.errors import RequestError
from foreword.text.chat import chat_text
from foreword.text.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def test_the_template_of_the_model_is_used(tokenizer: Tokenizer) -> None:
    text = chat_text(tokenizer, [{"role": "system", "content": "Be brief."}, *HELLO])
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_a_longer_conversation_starts_with_the_shorter_one(tokenizer: Tokenizer) -> None:
    short = chat_text(tokenizer, HELLO)
    longer = chat_text(tokenizer, [*HELLO, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "?"}])
    assert longer.startswith(short)


def test_no_messages(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="messages is empty") as caught:
        chat_text(tokenizer, [])
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"content": "x"}, "messages.1.role"),
        ({"role": "user"}, "messages.1.content"),
        ({"role": "user", "content": [{"type": "text", "text": "x"}]}, "messages.1.content"),
        ({"role": 3, "content": "x"}, "messages.1.role"),
        ("hello", "messages.1"),
    ],
)
def test_a_message_that_is_not_text_is_named(tokenizer: Tokenizer, message: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat_text(tokenizer, [*HELLO, message])
    assert caught.value.field == field


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
