"""`foreword keys` writes what `foreword serve --api-keys` reads."""

import stat
from pathlib import Path
from typing import Any

import pytest

from foreword.base.config import ServerConfig
from foreword.server import KeyFile, Listener
from tests.cli.conftest import Cli


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: Any) -> None:
        raise AssertionError("the model was loaded although the settings are wrong")

    monkeypatch.setattr("foreword.cli.serve.assemble", load)


def test_add_list_revoke(cli: Cli, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    assert cli("keys", "add", "--file", str(path), "--tenant", "red", "--admin", "--share", "0.25") == 0
    shown = capsys.readouterr()
    red = shown.out.strip()
    assert red.startswith("fw-")
    assert red not in shown.err
    assert "shown only once" in shown.err
    assert cli("keys", "add", "--file", str(path), "--tenant", "blue", "--max-requests", "3") == 0
    blue = capsys.readouterr().out.strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert red not in text
    assert blue not in text
    keys = KeyFile(path).keys
    found, other = keys.find(red), keys.find(blue)
    assert found is not None
    assert other is not None
    assert (found.tenant, found.admin, other.tenant, other.admin) == ("red", True, "blue", False)
    assert (keys.tenants["red"].share, keys.tenants["blue"].max_requests) == (0.25, 3)
    assert cli("keys", "list", "--file", str(path)) == 0
    table = capsys.readouterr().out
    assert all(word in table for word in (found.id, other.id, "red", "blue", "0.25", "equal part", "yes"))
    assert red not in table
    assert cli("keys", "revoke", "--file", str(path), other.id) == 0
    assert KeyFile(path).keys.find(blue) is None
    assert cli("keys", "revoke", "--file", str(path), other.id) == 2
    assert f"there is no key {other.id}" in capsys.readouterr().err
    for secret in (red, blue):
        assert cli("keys", "revoke", "--file", str(path), secret) == 2
        told = "".join(capsys.readouterr())
        assert secret not in told
        assert found.id in told
    assert KeyFile(path).keys.find(red) == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tenant", "no name"], "is no name for a tenant"),
        (["--tenant", "public"], "'public' is taken"),
        (["--tenant", "red", "--share", "1.5"], "between 0 and 1"),
        (["--tenant", "red", "--max-requests", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_added(
    cli: Cli, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    path = tmp_path / "keys.json"
    assert cli("keys", "add", "--file", str(path), *arguments) == 2
    assert message in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.usefixtures("no_model")
def test_a_server_refuses_a_key_file_that_it_should_not_trust(
    cli: Cli, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, heads = tmp_path / "keys.json", tmp_path / "heads.json"
    serve = ("serve", "--port", "0", "--api-keys", str(path))
    assert cli(*serve) == 2
    assert "foreword keys add" in capsys.readouterr().err
    cli("keys", "add", "--file", str(path), "--tenant", "red")
    path.chmod(0o644)
    assert cli(*serve) == 2
    assert f"chmod 600 {path}" in capsys.readouterr().err
    path.chmod(0o600)
    heads.write_text("[{}]")
    assert cli(*serve, "--public-heads", str(heads)) == 2
    assert str(heads) in capsys.readouterr().err
    assert cli("serve", "--port", "0", "--public-heads", str(heads)) == 2
    assert "public_heads needs api_keys" in capsys.readouterr().err


@pytest.mark.usefixtures("no_model")
def test_a_taken_port_is_noticed_before_the_model_is_loaded(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    listener = Listener(ServerConfig(port=0))
    assert cli("serve", "--port", str(listener.port)) == 2
    assert f"port {listener.port}: Address already in use" in capsys.readouterr().err
    listener.close()
