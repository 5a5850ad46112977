"""Chat messages to the text that the model's own template makes of them.

That text is tokenised as one (or cut where it makes no difference, see `borders`), never message by message: other cuts
could give other ids than the model was trained on, and other block hashes for the same conversation.
"""

from collections.abc import Mapping, Sequence
from typing import cast

from foreword.base.errors import RequestError
from foreword.text.tokenizer import Message, Tokenizer


def chat_text(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
    """The conversation, special tokens written out, ending where the assistant's answer begins.

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
        return tokenizer.render(messages)
    except Exception as error:  # a template is a program of the model's authors: it may raise anything
        raise RequestError(
            f"messages do not fit the model's chat template: {_one_line(error)}", field="messages"
        ) from error


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
