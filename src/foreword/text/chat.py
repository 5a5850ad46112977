"""Chat messages to token ids, through the model's own template and in one go.

The template's text is tokenised whole, never message by message: cutting it elsewhere could give other ids than the
model was trained on, and other block hashes for the same conversation.
"""

from collections.abc import Mapping, Sequence
from typing import cast

from foreword.base.errors import RequestError
from foreword.text.tokenizer import Message, Tokenizer


def chat_ids(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Ids of the conversation, ending where the assistant's answer begins.

    Raises RequestError naming `messages` when there are none, when the model has no chat template, or when the template
    refuses them; naming `messages.<i>.role` or `.content` when that is no text.
    """
    _check(messages)
    if not tokenizer.has_chat_template:
        raise RequestError(
            "messages cannot be used: this model has no chat template; send raw text as a prompt instead",
            field="messages",
        )
    try:
        text = tokenizer.render(messages)
    except Exception as error:  # a template is a program of the model's authors: it may raise anything
        raise RequestError(
            f"messages do not fit the model's chat template: {_one_line(error)}", field="messages"
        ) from error
    return tokenizer.encode(text, add_special_tokens=False, field="messages")


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise RequestError("messages is empty; give at least one message", field="messages")
    for i, message in enumerate(cast(Sequence[object], messages)):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages.{i} is {type(message).__name__}; it must be an object", field=f"messages.{i}")
        for name in ("role", "content"):
            value = cast(Message, message).get(name)
            if not isinstance(value, str):
                raise RequestError(
                    f"messages.{i}.{name} is {type(value).__name__}; it must be a string", field=f"messages.{i}.{name}"
                )


def _one_line(error: Exception) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__
