"""Chat messages to the text that the model's own template makes of them.

That text is tokenised as one (or cut where it makes no difference, see `borders`), never message by message: other cuts
could give other ids than the model was trained on, and other block hashes for the same conversation.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

from foreword.base.errors import RequestError
from foreword.text.tokenizer import Message, Tokenizer

Role = Literal["system", "developer", "user", "assistant"]
"""Who speaks. `developer` is OpenAI's newer name for `system`."""

ONLY_EMPTY = ("name", "refusal", "audio", "function_call", "tool_calls", "annotations")
"""What else a message may have, as long as nothing is in it: an assistant's turn can be sent back as it came."""


def chat_text(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
    """The conversation, special tokens written out, ending where the assistant's answer begins.

    `messages` are as `for_template` gives them. Raises RequestError naming `messages` when the model has no
    chat template or the template refuses them.
    """
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


def for_template(messages: object) -> tuple[dict[str, str], ...]:
    """What a caller gave as messages, checked, in the words that chat templates know: `role` and `content` as text.

    Raises RequestError naming `messages`, `messages.<i>` or `messages.<i>.<field>`.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise RequestError(
            f"messages is {_kind(cast(object, messages))}; it must be a list of objects with a role and a content",
            field="messages",
        )
    listed = tuple(cast(Iterable[object], messages))
    if not listed:
        raise RequestError("messages is empty; give at least one message", field="messages")
    return tuple(_read(message, f"messages.{i}") for i, message in enumerate(listed))


def _read(message: object, path: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{path} is {_kind(message)}; it must be an object with a role and a content", field=path)
    given = cast(Mapping[str, Any], message)
    for name, value in given.items():
        if name not in ("role", "content", *ONLY_EMPTY):
            raise RequestError(f"{path}.{name}: unknown field; a message has role and content", field=f"{path}.{name}")
        if name in ONLY_EMPTY and value not in (None, [], ()):
            raise RequestError(f"{path}.{name} is not supported; leave it out", field=f"{path}.{name}")
    for name in ("role", "content"):
        if name not in given:
            raise RequestError(f"{path}.{name} is missing", field=f"{path}.{name}")
    role, roles = given["role"], get_args(Role)
    if not isinstance(role, str) or role not in roles:
        shown = repr(role[:40]) if isinstance(role, str) else _kind(role)
        wanted = ", ".join(map(repr, roles[:-1]))
        raise RequestError(f"{path}.role is {shown}: input should be {wanted} or {roles[-1]!r}", field=f"{path}.role")
    return {"role": "system" if role == "developer" else role, "content": _content(given["content"], path)}


def _content(content: object, path: str) -> str:
    """Text, or text parts, which are joined by line feeds."""
    if isinstance(content, str):
        return content
    parts = cast(list[object], content) if isinstance(content, list) else []
    texts = [cast(dict[str, object], part).get("text") for part in parts if _is_text_part(part)]
    if not parts or len(texts) < len(parts):
        raise RequestError(
            f"{path}.content is {_kind(cast(object, content))}; it must be a string, or a list of parts of type 'text'",
            field=f"{path}.content",
        )
    return "\n".join(cast(list[str], texts))


def _is_text_part(part: object) -> bool:
    if not isinstance(part, dict):
        return False
    given = cast(dict[str, object], part)
    return given.keys() == {"type", "text"} and given["type"] == "text" and isinstance(given["text"], str)


def _kind(value: object) -> str:
    return "an object" if isinstance(value, Mapping) else type(value).__name__


def _one_line(error: Exception) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__
