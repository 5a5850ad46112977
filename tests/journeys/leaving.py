"""Clients that do not wait for their answer."""

import json
import random
import socket
import threading
from collections.abc import Mapping
from typing import Any

from tests.journeys.conftest import Running

PHASES = ("connect", "headers", "body", "sent", "first byte", "mid stream")


def leave(server: Running, body: Mapping[str, Any], draw: random.Random) -> str:
    """Send one completion over a bare socket and hang up in a random phase; the phase."""
    phase = draw.choice(PHASES)
    content = json.dumps({**body, "stream": draw.random() < 0.7}).encode()
    fields = {"Host": "127.0.0.1", "Content-Length": len(content), **server.headers}
    head = "POST /v1/completions HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    with socket.create_connection(address, timeout=60) as line:
        if phase == "connect":
            return phase
        line.sendall(f"{head}\r\n".encode() if phase != "headers" else head.encode()[:20])
        if phase == "headers":
            return phase
        line.sendall(content if phase != "body" else content[: len(content) // 2])
        if phase == "body":
            return phase
        if phase == "sent":
            threading.Event().wait(draw.random() * 0.2)
            return phase
        line.settimeout(draw.random() * 2 if phase == "first byte" else 60)
        try:
            for _ in range(1 if phase == "first byte" else draw.randrange(1, 12)):
                assert b" 403 " not in line.recv(400), "whoever hangs up was not let in at all"
        except TimeoutError:
            pass
    return phase
