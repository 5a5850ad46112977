"""`foreword inspect` and `foreword explain` against a real server: what they show is what the server says."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.conftest import Cli, cli
from tests.journeys.conftest import Running
from tests.journeys.test_tenants import House, guarded, large

__all__ = ["cli", "guarded", "large"]

HEAD = "The tower of Skarvnes was built in 1874 and stands forty-one metres above the sea. Its keeper was Ingrid. " * 3
SYSTEM = {"role": "system", "content": HEAD}


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def asked(server: Running, text: str) -> dict[str, Any]:
    return server.post("/chat", {"prompt": text, "max_tokens": 1}).json()


def test_inspect_shows_the_numbers_of_the_server(server: Running, cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    for n in range(5):
        asked(server, f"Call {n}. {HEAD}")
    assert cli("inspect", server.url, "--once") == 0
    shown = capsys.readouterr().out
    state = server.get("/v1/cache").json()
    tokens = state["totals"]["prompt_tokens"]
    assert f"{tokens['cached']:,} of {tokens['cached'] + tokens['computed']:,} = " in shown
    diverged = state["totals"]["reasons"]["diverged"]
    rows = [line for line in shown.splitlines() if "diverged" in line]
    assert [f"{diverged['requests']:,}" in rows[0], f"{diverged['tokens']:,}" in rows[0]] == [True, True]
    assert f"{state['blocks']['cached']:,} cached" in shown
    assert "Call 0. The tower" in shown or "The prompt, characters 5 to 6" in shown
    assert server.get("/v1/cache/advice").json()["advice"][0]["text"][:60] in shown
    assert "Tenants" not in shown


def test_inspect_shows_requests_under_way_and_goes_on_until_it_is_stopped(
    server: Running, cli: Cli, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("foreword.cli.inspect.sleep", sleep)
    body = {"prompt": HEAD, "max_tokens": 300, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()  # kept: the stream is closed with it
        next(lines)
        listed = server.get("/v1/cache/requests").json()
        assert cli("inspect", server.url, "--every", "0.5") == 130
    assert waits == [0.5] * 3
    shown = capsys.readouterr().out
    assert listed["total"] == 1
    assert listed["requests"][0]["phase"] == "decode"
    assert listed["requests"][0]["id"][:8] in shown
    assert "decode" in shown


@pytest.mark.parametrize("form", ["text", "body", "messages"])
def test_explain_parts_a_prompt_where_the_server_does(
    server: Running, cli: Cli, capsys: pytest.CaptureFixture[str], tmp_path: Path, form: str
) -> None:
    file = tmp_path / "prompt"
    talk = [SYSTEM, {"role": "user", "content": "It is 14:03 now. Who keeps the light?"}]
    if form == "text":
        asked(server, HEAD + "It is 14:02 now. Who keeps the light, and for how long will they?")
        file.write_text(HEAD + talk[1]["content"])
    else:
        other = [SYSTEM, {"role": "user", "content": "It is 14:02 now. Who keeps the light?"}]
        server.post("/v1/chat/completions", {"messages": other, "max_tokens": 8})
        file.write_text(json.dumps(talk if form == "messages" else {"model": "x", "messages": talk, "max_tokens": 9}))
    before = server.metrics()
    assert cli("explain", server.url, "--prompt", str(file), "--all") == 0
    shown = capsys.readouterr().out
    assert "The match ends at token" in shown
    assert "diverged" in shown
    assert "14:02" in shown
    body = {"prompt": file.read_text()} if form == "text" else {"messages": talk}
    found = server.post("/v1/cache/lookup", body).json()
    assert f"{found['cached_tokens']:,} of {found['prompt_tokens']:,} prompt tokens are cached" in shown
    place = "The prompt, character" if form == "text" else "Message 1 (user), character"
    assert f"{place} {found['where']['offset']}" in shown
    assert shown.count(HEAD.strip()) == 1
    assert server.metrics() == before


def test_explain_colours_what_is_cached_what_differs_and_the_rest(
    server: Running, cli: Cli, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    asked(server, HEAD + "It is 14:02 now. Who keeps the light, and for how long will they?")
    file = tmp_path / "prompt"
    file.write_text(HEAD + "It is 14:03 now. Who keeps the light?")
    assert cli("explain", server.url, "--prompt", str(file)) == 0
    shown = capsys.readouterr().out
    assert "It is 14:0\x1b[0m\x1b[1;37;41m3\x1b[0m\x1b[2m now. Who" in shown
    assert "\x1b[32m" in shown
    warm = tmp_path / "warm"
    warm.write_text(HEAD)
    server.post("/v1/cache/warm", {"prompt": HEAD + " And then?"})
    assert cli("explain", server.url, "--prompt", str(warm)) == 0
    assert "complete" in (shown := capsys.readouterr().out)
    assert "41m" not in shown


def test_what_is_wrong_is_told_with_the_way_out(
    guarded: House, cli: Cli, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, empty, odd = tmp_path / "prompt", tmp_path / "empty", tmp_path / "odd"
    torn = tmp_path / "torn.json"
    torn.write_text('{"prompt": "a"')
    file.write_text(HEAD)
    empty.write_text("")
    odd.write_text('{"promt": "a"}')
    url = guarded.boss.url
    cases: list[tuple[list[str], str]] = [
        (["inspect", url, "--once"], "wants a key: give --api-key"),
        (["inspect", "http://127.0.0.1:1", "--once"], "is the server running? Start one: foreword serve"),
        (["inspect", "ftp://here", "--once"], "it looks like http://127.0.0.1:8000"),
        (["inspect", url, "--every", "0"], "at least 0.1 seconds"),
        (["explain", url, "--prompt", str(tmp_path / "none")], "cannot be read: No such file"),
        (["explain", url, "--prompt", str(empty)], "is empty"),
        (["explain", url, "--prompt", str(torn)], "torn.json is not valid JSON"),
        (["explain", url, "--prompt", str(odd)], "must have one of messages, prompt, ids"),
        (["explain", url, "--prompt", str(file), "--api-key", "fw-wrong"], "wants a key"),
    ]
    for arguments, told in cases:
        assert cli(*arguments) == 2
        assert told in capsys.readouterr().err
    odd.write_text('{"messages": [{"role": "emperor", "content": "a"}]}')
    assert cli("explain", url, "--prompt", str(odd), "--api-key", str(guarded.red.key)) == 2
    assert "answered 400: messages.0.role" in capsys.readouterr().err
    monkeypatch.setenv("FOREWORD_API_KEY", str(guarded.red.key))
    assert cli("explain", url, "--prompt", str(file)) == 0
    assert "prompt tokens are cached" in capsys.readouterr().out


def test_a_tenant_sees_its_own_page_and_an_operator_all(
    guarded: House, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    asked(guarded.blue, "A secret of blue's own. " + HEAD)
    assert cli("inspect", guarded.red.url, "--once", "--api-key", str(guarded.red.key)) == 0
    own = capsys.readouterr().out
    assert "Tenant red" in own
    assert "blue" not in own
    assert cli("inspect", guarded.boss.url, "--once", "--api-key", str(guarded.boss.key)) == 0
    whole = capsys.readouterr().out
    assert "Tenants" in whole
    assert "A secret of blue's own." in whole
