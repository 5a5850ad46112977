"""What a model may call, and what it called, checked: the same for every face, in the words that chat templates know.

Nothing is put in another order: tools stay in the order they came in, and so do the keys of each. Templates write both
out as they find them, so another order is another prompt.
"""

import json
from collections.abc import Iterable, Mapping
from re import fullmatch
from typing import Any, cast

from foreword.base.errors import RequestError

_NAME = "[a-zA-Z0-9_-]{1,64}"


def tools_for_template(tools: object) -> tuple[dict[str, Any], ...]:
    """What a caller gave as tools, in OpenAI's form. None and an empty list are no tools.

    Raises RequestError naming `tools` or the part of a tool that is wrong.
    """
    if tools is None:
        return ()
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Iterable):
        raise _wrong("tools", cast(object, tools), "a list of objects of type 'function'")
    return tuple(_tool(tool, f"tools.{i}") for i, tool in enumerate(cast(Iterable[object], tools)))


def calls_for_template(calls: object, path: str) -> list[dict[str, Any]]:
    """The calls of an assistant's turn; their arguments as objects, not as the JSON text that the API has.

    Raises RequestError naming `path` or the part that is wrong.
    """
    if calls is None:
        return []
    if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Iterable):
        raise _wrong(path, cast(object, calls), "a list of calls")
    return [_call(call, f"{path}.{i}") for i, call in enumerate(cast(Iterable[object], calls))]


def _tool(tool: object, path: str) -> dict[str, Any]:
    given = _object(tool, path, {"type": True, "function": True})
    _check_type(given["type"], f"{path}.type")
    path = f"{path}.function"
    allowed = {"name": True, "description": False, "parameters": False, "strict": False}
    function = _object(given["function"], path, allowed)
    if not isinstance(function["name"], str) or fullmatch(_NAME, function["name"]) is None:
        raise _wrong(f"{path}.name", function["name"], "1 to 64 letters, digits, underscores or dashes")
    if not isinstance(function.get("description"), str | None):
        raise _wrong(f"{path}.description", function["description"], "a string")
    if not isinstance(function.get("parameters"), Mapping | None):
        raise _wrong(f"{path}.parameters", function["parameters"], "an object, a JSON schema")
    if function.get("strict") not in (None, False):
        raise RequestError(
            f"{path}.strict: arguments cannot be held to their schema here; leave it out or send false",
            field=f"{path}.strict",
        )
    return _plain(given, path)


def _call(call: object, path: str) -> dict[str, Any]:
    given = _object(call, path, {"id": True, "type": False, "function": True})
    if not isinstance(given["id"], str) or not given["id"]:
        raise _wrong(f"{path}.id", given["id"], "a string of at least one character")
    _check_type(given.get("type", "function"), f"{path}.type")
    function = _object(given["function"], f"{path}.function", {"name": True, "arguments": True})
    if not isinstance(function["name"], str) or not function["name"]:
        raise _wrong(f"{path}.function.name", function["name"], "a string of at least one character")
    arguments = _arguments(function["arguments"], f"{path}.function.arguments")
    return {"id": given["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _arguments(value: object, path: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            read: object = json.loads(value)
        except (ValueError, RecursionError):
            read = None
    else:
        read = value
    if not isinstance(read, Mapping):
        raise _wrong(path, value, "a JSON object, written out as a string")
    return _plain(cast(Mapping[str, Any], read), path)


def _object(value: object, path: str, fields: Mapping[str, bool]) -> Mapping[str, Any]:
    """An object with none but these fields, and all of those that are needed."""
    if not isinstance(value, Mapping):
        raise _wrong(path, value, f"an object with {' and '.join(name for name, needed in fields.items() if needed)}")
    given = cast(Mapping[str, Any], value)
    for name in given:
        if name not in fields:
            raise RequestError(
                f"{path}.{str(name)[:100]}: unknown field; known are {', '.join(fields)}",
                field=f"{path}.{str(name)[:100]}",
            )
    for name, needed in fields.items():
        if needed and name not in given:
            raise RequestError(f"{path}.{name} is missing", field=f"{path}.{name}")
    return given


def _check_type(value: object, path: str) -> None:
    if value != "function":
        raise _wrong(path, value, "'function', the only type that is supported")


def _plain(value: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A copy that nobody else holds, of nothing but what JSON has."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{path} cannot be written as JSON: {error}", field=path) from None


def _wrong(path: str, value: object, wanted: str) -> RequestError:
    shown = repr(value[:40]) if isinstance(value, str) else "null" if value is None else type(value).__name__
    return RequestError(f"{path} is {shown}; it must be {wanted}", field=path)
