"""An answer read as a message: words, thoughts and calls of tools, by the response template that a tokenizer brings.

    answer   Let me look. <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>
    said     text "Let me look. ", then the call of weather with {"city": "Rome"}

`transformers` does the reading. What it cannot read is text, as it would be without: no word of an answer gets lost.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast
from uuid import uuid4

from foreword.text.tokenizer import ResponseParser

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""What response templates call what a model says to itself."""
_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a model wants to be made."""

    id: str
    name: str
    arguments: str
    """A JSON object, written out."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a bit of an answer is, once that is known."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class Speech:
    """One answer as it grows; special tokens are written out in it."""

    __slots__ = ("_open", "_parser", "_unread")

    def __init__(self, parser: ResponseParser) -> None:
        self._parser: ResponseParser | None = parser
        self._unread = ""
        """What was heard and is not given out: delimiters, and calls that are not complete."""
        self._open = ""
        """Of that: what stands in a call."""

    def push(self, text: str) -> Said:
        """What is known now of all that was said; the text of a call waits until it is complete."""
        self._unread += text
        return self._read(lambda parser: parser.feed(text))

    def finish(self) -> Said:
        """The rest, once it is known that nothing follows."""
        return self._read(lambda parser: parser.finalize()[1])

    def _read(self, step: Callable[[ResponseParser], list[dict[str, Any]]]) -> Said:
        parser = self._parser
        if parser is None:
            return Said(self._rest())
        words, thoughts, calls = "", "", list[ToolCall]()
        try:
            for event in step(parser):
                field, kind = event["field"], event["type"]
                if kind == "region_chunk" and field == _CALLS:
                    self._open += event["text"]
                elif kind == "region_chunk":
                    self._pass(event["text"])
                    if field in _THOUGHTS:
                        thoughts += event["text"]
                    else:
                        words += event["text"]
                elif kind == "region_close" and field == _CALLS:
                    calls += _calls(event["value"])
                    self._pass(self._open)
                    self._open = ""
        except Exception:  # noqa: BLE001  a model may write anything, and the parser raises what its parts raise
            self._parser = None
            return Said(words + self._rest(), thoughts, tuple(calls))
        return Said(words, thoughts, tuple(calls))

    def _pass(self, text: str) -> None:
        """This much, and the delimiters before it, are given out."""
        if text:
            self._unread = self._unread.partition(text)[2]

    def _rest(self) -> str:
        rest, self._unread = self._unread, ""
        return rest


def _calls(value: Any) -> list[ToolCall]:
    """The calls in a region, in the form that chat templates have them. Raises ValueError for any other form."""
    if isinstance(value, list):
        return [call for one in cast(list[Any], value) for call in _calls(one)]
    try:
        name, arguments = value["function"]["name"], value["function"].get("arguments")
    except (TypeError, KeyError, AttributeError):
        raise ValueError("a call without a function and its name") from None
    if not isinstance(name, str) or not isinstance(arguments, Mapping | None):
        raise ValueError("a call whose name is no text, or whose arguments are no object")
    return [ToolCall(f"call_{uuid4().hex[:24]}", name, json.dumps(arguments or {}, ensure_ascii=False))]
