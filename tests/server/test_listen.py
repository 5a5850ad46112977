"""The socket: which addresses, and how it ends."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from foreword.base.config import ServerConfig
from foreword.base.errors import ConfigError
from foreword.server import Listener, check_address
from tests.server.fakes import FakeFront, World


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    check_address(ServerConfig(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_other_addresses_must_be_meant(host: str) -> None:
    with pytest.raises(ConfigError, match="--api-keys, or say --insecure"):
        check_address(ServerConfig(host=host))
    check_address(ServerConfig(host=host, insecure=True))
    check_address(ServerConfig(host=host, api_keys="keys.json"))


def test_a_taken_port_is_refused_by_name() -> None:
    first = Listener(ServerConfig(port=0))
    first_port = first.port
    with pytest.raises(ConfigError, match=f"port {first.port}: Address already in use"):
        Listener(ServerConfig(port=first.port))
    first.close()
    Listener(ServerConfig(port=first_port)).close()


def test_clients_that_come_early_wait() -> None:
    listener = Listener(ServerConfig(port=0))
    answers: list[int] = []
    early = threading.Thread(target=lambda: answers.append(httpx.get(f"{listener.url}/health", timeout=20).status_code))
    early.start()
    early.join(0.3)
    assert early.is_alive()
    thread = threading.Thread(target=listener.run, args=[World().app()])
    thread.start()
    early.join(20)
    assert answers == [200]
    listener.stop()
    thread.join(10)
    assert not thread.is_alive()


async def test_replies_are_sent_without_waiting_for_acknowledgements() -> None:
    listener, taken = Listener(ServerConfig(port=0)), asyncio.Queue[int]()

    def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own: socket.socket = writer.get_extra_info("socket")
        taken.put_nowait(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(take, sock=listener._socket):
        _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        assert await asyncio.wait_for(taken.get(), 10) != 0
        writer.close()


def test_answers_under_way_get_their_time_and_are_cancelled_then() -> None:
    world = World(front=FakeFront(endless=True))
    listener = Listener(ServerConfig(port=0), drain_s=1)
    thread = threading.Thread(target=listener.run, args=[world.app()])
    thread.start()
    while not listener.started:
        time.sleep(0.01)
    with httpx.stream("POST", f"{listener.url}/v1/completions", json={"prompt": "a", "stream": True}) as response:
        assert next(response.iter_lines()).startswith("data: ")
    while not world.front.answers[0].num_cancels:
        time.sleep(0.005)
    with httpx.stream("POST", f"{listener.url}/v1/completions", json={"prompt": "a", "stream": True}) as response:
        lines = response.iter_lines()  # kept: httpx hangs up when the iterator goes
        next(lines)
        listener.stop()
        time.sleep(0.5)
        assert world.front.answers[1].num_cancels == 0
        thread.join(10)
    assert not thread.is_alive()
    assert world.front.answers[1].num_cancels


def test_a_hundred_megabytes_are_refused_over_a_real_socket() -> None:
    world = World()
    listener = Listener(ServerConfig(port=0))
    thread = threading.Thread(target=listener.run, args=[world.app()])
    thread.start()
    while not listener.started:
        time.sleep(0.01)
    try:
        with httpx.Client(base_url=listener.url) as client:
            for content in (b"x" * 100_000_000, (b"x" * 1_000_000 for _ in range(100))):
                response = client.post("/v1/completions", content=content)
                assert response.status_code == 413
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    finally:
        listener.stop()
        thread.join(10)


_PROGRAM = """
from tests.server.fakes import World
from foreword.base.config import ServerConfig
from foreword.server import Listener
listener = Listener(ServerConfig(port=0))
print(listener.port, flush=True)
listener.run(World().app())
print("after", flush=True)
"""


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_and_the_program_goes_on(name: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        for _ in range(500):
            try:
                assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
                break
            except httpx.ConnectError:
                time.sleep(0.02)
        process.send_signal(name)
        assert process.stdout.readline() == "after\n"
        assert process.wait(10) == 0
