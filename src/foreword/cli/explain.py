"""`foreword explain`: which part of a prompt a server has cached, and where and why that ends, in colour."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.text import Text
from tyro.conf import Positional

from foreword.base.errors import ConfigError

_CONTEXT_CHARS = 400
_FORMS = ("messages", "prompt", "ids")
_CACHED, _DIFFERS, _REST = "green", "bold white on red", "dim"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explain:
    """Show what of a prompt would come from the cache, where it first differs, and why. Computes nothing."""

    url: Positional[str] = "http://127.0.0.1:8000"
    """Where the server listens."""
    prompt: str
    """A file: plain text, or a request's JSON body with prompt, or messages and tools. - is the standard input."""
    api_key: str | None = None
    """A key of --api-keys. Left out: $FOREWORD_API_KEY, if that is set."""
    all: bool = False
    """Print the whole prompt, not only what stands around the end of the cached part."""

    def run(self) -> int:
        """Ask and print."""
        from foreword.cli.remote import Remote

        body = _read(self.prompt)
        remote = Remote(self.url, self.api_key)
        found = remote.post("/v1/cache/lookup", body)
        console = Console()
        for part in (_verdict(found), _coloured(body, found, whole=self.all)):
            console.print(part, highlight=False, soft_wrap=True)
        return 0


def _read(name: str) -> dict[str, Any]:
    """What to ask `/v1/cache/lookup`: a text, or what a request's body has of a prompt. Raises ConfigError."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not UTF-8 text") from None
    try:
        body: Any = json.loads(text)
    except json.JSONDecodeError as error:
        if name.endswith(".json"):
            raise ConfigError(f"{name} is not valid JSON: {error}") from None
        body = None
    if isinstance(body, list) and body and isinstance(body[0], dict):
        body = {"messages": cast(Any, body)}
    if not isinstance(body, dict):
        if not text:
            raise ConfigError(f"{name} is empty; it must hold the prompt")
        return {"prompt": text}
    given = [form for form in _FORMS if form in body]
    if len(given) != 1:
        raise ConfigError(f"{name} is JSON without a prompt; it must have one of {', '.join(_FORMS)}")
    return {name: body[name] for name in (*given, "tools") if name in body}


def _verdict(found: Mapping[str, Any]) -> Text:
    prompt, cached = found["prompt_tokens"], found["cached_tokens"]
    text = Text(f"{cached:,} of {prompt:,} prompt tokens are cached ({cached / prompt:.0%}). ", style="bold")
    text.append(f"The match ends at token {found['at_token']:,}: {found['reason']}", style="bold")
    left, where = found["left"], found["where"]
    if left is not None:
        text.append(f" ({left['cause']}, {left['ago_s']:,.0f} s ago)")
    if where is not None:
        text.append(f"\n{_place(where)}")
        if where["cached"] is not None:
            text.append(f"\n  cached  ...{_one_line(where['cached'])}...\n  here    ...{_one_line(where['prompt'])}...")
    return text.append("\n")


def _place(where: Mapping[str, Any]) -> str:
    if where["offset"] is None:
        return f"There the prompt goes on: ...{_one_line(where['prompt'])}..."
    if where["tool"] is not None:
        return f"Tool {where['tool']}, character {where['offset']} as the template writes it"
    message = "The prompt" if where["message"] is None else f"Message {where['message']} ({where['role']})"
    return f"{message}, character {where['offset']}"


def _coloured(body: Mapping[str, Any], found: Mapping[str, Any], *, whole: bool) -> Text:
    """The prompt: what is cached, what differs first, the rest."""
    texts = _texts(body)
    where, out = found["where"], Text()
    if not texts or (where is not None and (where["offset"] is None or where["tool"] is not None)):
        return out
    # Without a place either all of it is cached or nothing can be.
    end = len(texts) if found["reason"] == "complete" else 0
    last, offset = (end, 0) if where is None else (where["message"] or 0, where["offset"])
    for number, (role, content) in enumerate(texts):
        if role is not None:
            out.append(f"[{number} {role}]\n", style="bold")
        if number < last:
            _add(out, content, _CACHED, keep=None if whole else -_CONTEXT_CHARS)
        elif number > last or where is None:
            _add(out, content, _REST, keep=None if whole else _CONTEXT_CHARS)
        else:
            stop = _word_end(content, offset)
            _add(out, content[:offset], _CACHED, keep=None if whole else -_CONTEXT_CHARS)
            out.append(content[offset:stop], style=_DIFFERS)
            _add(out, content[stop:], _REST, keep=None if whole else _CONTEXT_CHARS)
        out.append("\n")
    return out


def _texts(body: Mapping[str, Any]) -> Sequence[tuple[str | None, str]]:
    if "messages" not in body:
        return [(None, body["prompt"])] if isinstance(body.get("prompt"), str) else []
    return [(str(message["role"]), _content(message.get("content") or "")) for message in body["messages"]]


def _content(content: Any) -> str:
    """As the server reads it: text, or text parts joined by line feeds."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _add(out: Text, text: str, style: str, *, keep: int | None) -> None:
    """Append a text, or its beginning, or (`keep` below 0) its end."""
    cut = 0 if keep is None else len(text) - abs(keep)
    if cut <= 0 or keep is None:
        out.append(text, style=style)
    elif keep < 0:
        out.append(f"... {cut:,} characters ...", style="italic").append(text[keep:], style=style)
    else:
        out.append(text[:keep], style=style).append(f"... {cut:,} characters ...", style="italic")


def _word_end(text: str, start: int) -> int:
    """Where the word that begins or goes on here ends, a blank itself included."""
    end = min(start + 1, len(text))
    while end < len(text) and not text[end].isspace():
        end += 1
    return end


def _one_line(text: str) -> str:
    return " ".join(text.split())
