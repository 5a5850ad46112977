"""`foreword serve` as a process: it says what it serves, answers, and stops as it was told."""

import json
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import spawn


class Server:
    """A running `foreword serve` on a free port."""

    def __init__(self, *arguments: str) -> None:
        self.process: subprocess.Popen[str] = spawn("serve", "--port", "0", "--kv-cache", "64", *arguments)
        self.lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"Listening on (http://\S+)", line):
                self.url = found[1]
                return
        raise AssertionError("".join(self.lines))

    def complete(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        body = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as answer:
                return answer.status
        except urllib.error.HTTPError as refused:
            return refused.code

    def wait_until_running(self, num: int = 1) -> None:
        while True:
            with urllib.request.urlopen(f"{self.url}/v1/cache", timeout=60) as answer:
                if json.load(answer)["requests"]["running"] == num:
                    return
            time.sleep(0.02)

    def wait_for(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return
        raise AssertionError("".join(self.lines))


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.process.kill()
    made.process.wait()


def test_says_its_state_then_drains_when_terminated(server: Server) -> None:
    said = "".join(server.lines)
    assert "SmolLM2-135M-Instruct on cpu" in said
    assert "64 blocks of 16 tokens = 1,024 tokens" in said
    assert "context 1,024 tokens" in said
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(server.complete("Once upon a time", 60)))
    asking.start()
    server.wait_until_running()
    server.process.send_signal(signal.SIGTERM)
    asking.join()
    assert answers[0]["usage"]["completion_tokens"] == 60
    assert server.process.wait(20) == 0


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_leaves_at_once_even_if_a_client_never_reads(server: Server, name: signal.Signals) -> None:
    broken: list[Exception] = []

    def ask() -> None:
        try:
            server.complete("Once upon a time", 1000)
        except Exception as error:
            broken.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        body = json.dumps({"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True, "logprobs": 20})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        deaf.sendall((head + body).encode())
        server.wait_until_running(2)
        server.process.send_signal(name)
        server.wait_for("Stopping: 2 requests under way")
        server.process.send_signal(name)
        assert server.process.wait(10) == 0
    asking.join()
    assert broken
    assert server.process.stdout is not None
    assert server.process.stdout.read() == "Stopped.\n"


def test_ready_waits_for_the_warm_file_and_the_first_request_then_hits(tmp_path: Path) -> None:
    texts = [f"Hotel {n}. " + "Breakfast is from seven to ten in the garden room. " * 18 for n in range(4)]
    file = tmp_path / "warm.json"
    file.write_text(json.dumps([{"prompt": text} for text in texts]))
    server = Server("--warm", str(file))
    try:
        assert (server.status("/health"), server.status("/ready")) == (200, 503)
        while server.status("/ready") == 503:
            time.sleep(0.02)
        usage = server.complete(texts[-1] + "When is breakfast?", 2)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 16 > 150
        stranger = server.complete("Whatever else is asked, word for word, was not in the file. " * 4, 2)["usage"]
        assert stranger["prompt_tokens_details"]["cached_tokens"] == 0
    finally:
        server.process.kill()
        server.process.wait()
