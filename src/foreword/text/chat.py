"""Chat messages to the text that the model's own template makes of them.

That text is tokenised as one (or cut where it makes no difference, see `borders`), never message by message: other cuts
could give other ids than the model was trained on, and other block hashes for the same conversation.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

from foreword.base.errors import RequestError
from foreword.text.tokenizer import Message, Tokenizer
from foreword.text.tools import calls_for_template

Role = Literal["system", "developer", "user", "assistant", "tool"]
"""Who speaks. `developer` is OpenAI's newer name for `system`; `tool` is what a tool gave back."""

ONLY_EMPTY = ("refusal", "audio", "function_call", "annotations")
"""What else a message may have, as long as nothing is in it: an assistant's turn can be sent back as it came."""

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "assistant": ("tool_calls", "reasoning_content"),
    "tool": ("tool_call_id", "name"),
}
"""What else those who are named may say."""
_OTHERS = ("name", "tool_calls", "tool_call_id", "reasoning_content")
"""All of those."""


def chat_text(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """The conversation, special tokens written out, ending where the assistant's answer begins.

    `messages` and `tools` are as `for_template` and `tools_for_template` give them. Raises RequestError naming
    `messages` when the model has no chat template or the template refuses them, and `tools` or the calls of a message
    when the template writes nothing of them.
    """
    if not tokenizer.has_chat_template:
        raise RequestError(
            "messages cannot be used: this model has no chat template; send raw text as a prompt instead",
            field="messages",
        )
    try:
        text = tokenizer.render(messages, tools)
    except Exception as error:  # a template is a program of the model's authors: it may raise anything
        raise RequestError(
            f"messages do not fit the model's chat template: {_one_line(error)}", field="messages"
        ) from error
    if tools and text == render_without(tokenizer, messages):
        raise RequestError(
            f"tools cannot be used: this model's chat template does not write them, so the model would not know of"
            f" them; {_WAYS_OUT}",
            field="tools",
        )
    called = next((i for i, message in enumerate(messages) if message.get("tool_calls")), None)
    if called is not None and text == render_without(tokenizer, _uncalled(messages), tools):
        raise RequestError(
            f"messages.{called}.tool_calls cannot be used: this model's chat template does not write them; {_WAYS_OUT}",
            field=f"messages.{called}.tool_calls",
        )
    return text


_WAYS_OUT = "say it in the text of a message, or serve a model whose template knows tools"


def render_without(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> str | None:
    """What the template writes when a part of a request is left out; None if it refuses that."""
    try:
        return tokenizer.render(messages, tools)
    except Exception:  # noqa: BLE001  as in `chat_text`
        return None


def _uncalled(messages: Sequence[Message]) -> list[Message]:
    return [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]


def for_template(messages: object) -> tuple[dict[str, Any], ...]:
    """What a caller gave as messages, checked, in the words that chat templates know.

    Each has `role` and `content` as text; an assistant's may have `tool_calls` and `reasoning_content`, a tool's has
    `tool_call_id`. Raises RequestError naming `messages`, `messages.<i>` or `messages.<i>.<field>`.
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


def _read(message: object, path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{path} is {_kind(message)}; it must be an object with a role and a content", field=path)
    given = cast(Mapping[str, Any], message)
    role = _role(given, path)
    for name, value in given.items():
        if name not in ("role", "content", *ONLY_EMPTY, *_OTHERS):
            raise RequestError(f"{path}.{name}: unknown field; a message has role and content", field=f"{path}.{name}")
        if name not in ("role", "content", *_FIELDS.get(role, ())) and value not in (None, [], ()):
            raise RequestError(
                f"{path}.{name} is not supported in a message of role {role!r}; leave it out", field=f"{path}.{name}"
            )
    calls = calls_for_template(given.get("tool_calls"), f"{path}.tool_calls")
    if "content" not in given and not calls:
        raise RequestError(f"{path}.content is missing", field=f"{path}.content")
    silent = bool(calls) and given.get("content") is None
    read: dict[str, Any] = {"role": role, "content": "" if silent else _content(given["content"], path)}
    if calls:
        read["tool_calls"] = calls
    for name, needed in (("reasoning_content", False), ("tool_call_id", role == "tool"), ("name", False)):
        value = given.get(name)
        if value is None and not needed:
            continue
        if not isinstance(value, str) or not value:
            shown = "missing" if name not in given else f"{_kind(value)}; it must be a string, and not empty"
            raise RequestError(f"{path}.{name} is {shown}", field=f"{path}.{name}")
        read[name] = value
    return read


def _role(given: Mapping[str, Any], path: str) -> str:
    if "role" not in given:
        raise RequestError(f"{path}.role is missing", field=f"{path}.role")
    role, roles = given["role"], get_args(Role)
    if not isinstance(role, str) or role not in roles:
        shown = repr(role[:40]) if isinstance(role, str) else _kind(role)
        wanted = ", ".join(map(repr, roles[:-1]))
        raise RequestError(f"{path}.role is {shown}: input should be {wanted} or {roles[-1]!r}", field=f"{path}.role")
    return "system" if role == "developer" else role


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
    return "null" if value is None else "an object" if isinstance(value, Mapping) else type(value).__name__


def _one_line(error: Exception) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__
