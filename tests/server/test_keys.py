"""The key file: what it may hold, who may read it, and that a change counts at once."""

import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foreword.base.errors import ConfigError
from foreword.server.auth import KeyFile, change_keys, new_key, read_keys
from foreword.server.keys import Keys, digest, parse, written

GOOD: dict[str, Any] = {
    "format": 1,
    "tenants": {"red": {"share": 0.25, "max_requests": 8}, "blue": {"share": None, "max_requests": 2}},
    "keys": [
        {"sha256": digest("fw-red"), "tenant": "red", "admin": False},
        {"sha256": digest("fw-boss"), "tenant": "red", "admin": True},
        {"sha256": digest("fw-blue"), "tenant": "blue", "admin": False},
    ],
}


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    data = json.loads(json.dumps(GOOD))
    change(data)
    return json.dumps(data)


def put(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_what_is_written_is_read_back() -> None:
    keys = parse(json.dumps(GOOD))
    assert parse(written(keys)) == keys
    found = keys.find("fw-boss")
    assert found is not None
    assert (found.tenant, found.admin, found.id) == ("red", True, digest("fw-boss")[:8])
    assert keys.find("fw-nobody") is None
    assert keys.find("") is None
    assert keys.find(digest("fw-boss")) is None  # what the file holds opens nothing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[]", "no object"),
        ("{}", "has no format"),
        (changed(lambda d: d.update(format=2)), "reads format 1"),
        (changed(lambda d: d.update(format=True)), "format has the wrong type"),
        (changed(lambda d: d.update(extra=1)), "unknown field 'extra'"),
        (changed(lambda d: d["keys"][0].update(salt="x")), "keys.0 has an unknown field 'salt'"),
        (changed(lambda d: d["keys"][0].pop("tenant")), "keys.0 has no tenant"),
        (changed(lambda d: d["keys"][0].update(admin=1)), "keys.0.admin has the wrong type"),
        (changed(lambda d: d["keys"][0].update(sha256="fw-plain")), "no SHA-256 digest"),
        (changed(lambda d: d["keys"][0].update(tenant="green")), "not among tenants"),
        (changed(lambda d: d["keys"].append(d["keys"][0])), "two keys have one id"),
        (changed(lambda d: d["keys"].pop()), "tenant 'blue' has no key"),
        (changed(lambda d: d["tenants"]["red"].update(share=1.5)), "share of red is 1.5"),
        (changed(lambda d: d["tenants"]["red"].update(share=float("nan"))), "share of red is nan"),
        (changed(lambda d: d["tenants"]["blue"].update(share=0.8)), "make 1.05 together"),
        (changed(lambda d: d["tenants"]["red"].update(max_requests=0)), "max_requests of red is 0"),
        (changed(lambda d: d["tenants"]["red"].update(max_requests="8")), "wrong type"),
        (changed(lambda d: d["tenants"].update(public=GOOD["tenants"]["red"])), "'public' is taken"),
        (changed(lambda d: d["tenants"].update({"": GOOD["tenants"]["red"]})), "no name for a tenant"),
        (changed(lambda d: d["tenants"].update({"a/b": GOOD["tenants"]["red"]})), "no name for a tenant"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = put(tmp_path / "keys.json", text)
    with pytest.raises(ConfigError, match=message) as refused:
        KeyFile(path)
    assert str(path) in str(refused.value)
    assert "foreword keys add" in str(refused.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o666])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = put(tmp_path / "keys.json", json.dumps(GOOD), mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        KeyFile(path)
    path.chmod(0o600)
    assert len(KeyFile(path).keys.keys) == 3


def test_a_missing_a_broken_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist; make it: foreword keys add"):
        KeyFile(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyFile(tmp_path)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe")
    binary.chmod(0o600)
    with pytest.raises(ConfigError, match="not UTF-8"):
        KeyFile(binary)
    with pytest.raises(ConfigError, match="holds no key"):
        KeyFile(put(tmp_path / "empty.json", written(Keys())))


def test_shares_leave_room_for_whoever_comes_later() -> None:
    shares = parse(json.dumps(GOOD)).shares()
    assert shares == {"red": 0.25, "blue": pytest.approx(0.375)}
    assert Keys().shares() == {}
    alone = Keys().with_key(new_key("red", admin=False)[1], None, None)
    assert alone.shares() == {"red": 0.5}
    full = alone.with_key(new_key("blue", admin=False)[1], 1.0, None)
    assert full.shares() == {"red": 0.0, "blue": 1.0}


def test_adding_and_revoking(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    secret, key = new_key("red", admin=True)
    change_keys(path, lambda keys: keys.with_key(key, 0.5, None))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret not in path.read_text()
    assert len(secret) > 40
    again, second = new_key("red", admin=False)
    change_keys(path, lambda keys: keys.with_key(second, None, 3))
    keys = read_keys(path)
    assert (keys.tenants["red"].share, keys.tenants["red"].max_requests) == (0.5, 3)
    assert keys.find(secret) == key
    assert keys.find(again) == second
    change_keys(path, lambda keys: keys.without(key.id))
    assert read_keys(path).find(secret) is None
    with pytest.raises(ConfigError, match=f"no key {key.id}; there are: {second.id}"):
        change_keys(path, lambda keys: keys.without(key.id))
    assert change_keys(path, lambda keys: keys.without(second.id)) == Keys()
    assert [file.name for file in tmp_path.iterdir()] == ["keys.json"]


def test_a_change_that_makes_no_sense_leaves_the_file_alone(tmp_path: Path) -> None:
    path = put(tmp_path / "keys.json", json.dumps(GOOD))
    before = path.read_text()
    for tenant, share in (("green", 0.9), ("public", None), ("no good", None), ("red", 2.0)):
        key = new_key(tenant, admin=False)[1]
        with pytest.raises(ConfigError):
            change_keys(path, lambda keys, key=key, share=share: keys.with_key(key, share, None))
    put(tmp_path / "keys.json", before, 0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        change_keys(path, lambda keys: keys)
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["keys.json"]


def test_a_running_server_takes_changes_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = put(tmp_path / "keys.json", json.dumps(GOOD))
    file = KeyFile(path)
    secret, key = new_key("green", admin=False)
    change_keys(path, lambda keys: keys.with_key(key, None, None))
    assert file.keys.find(secret) == key
    change_keys(path, lambda keys: keys.without(key.id))
    assert file.keys.find(secret) is None
    good = file.keys
    with caplog.at_level(logging.ERROR):
        put(path, "{broken")
        assert (file.keys, file.keys) == (good, good)
        assert len(caplog.records) == 1
        assert "the keys known before go on counting" in caplog.text
        path.unlink()
        assert (file.keys, file.keys) == (good, good)
        assert len(caplog.records) == 2
        put(path, written(Keys()), 0o644)
        assert file.keys == good
    path.chmod(0o600)
    assert file.keys == Keys(), "the last key was revoked: nobody gets in"


def test_a_write_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "keys.json", json.dumps(GOOD))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        change_keys(path, lambda keys: keys.without(digest("fw-boss")[:8]))
    assert read_keys(path) == parse(json.dumps(GOOD))
    assert [file.name for file in tmp_path.iterdir()] == ["keys.json"]


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"format": 1, "tenants": {"a": {"share": 1' + "0" * 400 + ', "max_requests": 1}}, "keys": []}'],
)
def test_monstrous_files_are_malformed_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="cannot be used"):
        KeyFile(path)


def test_a_pipe_is_no_key_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        KeyFile(tmp_path / "pipe")
