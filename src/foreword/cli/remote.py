"""A running server, from the command line: JSON in and out, and errors that name the way out."""

import json
import os
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from foreword.base.errors import ConfigError

_TIMEOUT_S = 30.0


class Remote:
    """One server and the key for it."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """No key: that of $FOREWORD_API_KEY, if it is set. Raises ConfigError for what is no address."""
        address = url if "://" in url else f"http://{url}"
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url} is no address of a server; it looks like http://127.0.0.1:8000")
        key = api_key or os.environ.get("FOREWORD_API_KEY")
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.url = address.rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT_S)

    def get(self, path: str) -> dict[str, Any]:
        """The answer. Raises ConfigError."""
        return self._send("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer. Raises ConfigError."""
        return self._send("POST", path, body)

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            reply = self._client.request(method, path, json=body)
        except httpx.TimeoutException:
            raise ConfigError(f"{self.url} did not answer within {_TIMEOUT_S:.0f} seconds; is it busy?") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(
                f"{self.url} cannot be reached ({error}); is the server running? Start one: foreword serve"
            ) from None
        if reply.status_code == 401:
            raise ConfigError(f"{self.url} wants a key: give --api-key, one that foreword keys add has printed")
        answer = _object(reply.content)
        if answer is None:
            raise ConfigError(f"{self.url}{path} answered {reply.status_code} and no JSON; is it a Foreword server?")
        if not reply.is_success:
            said = answer.get("error")
            message = cast(dict[str, Any], said).get("message") if isinstance(said, dict) else "nothing more"
            raise ConfigError(f"{self.url}{path} answered {reply.status_code}: {message}")
        return answer


def _object(content: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(content)
    except ValueError:
        return None
    return cast(dict[str, Any], answer) if isinstance(answer, dict) else None
