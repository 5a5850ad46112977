"""What the command line says of models that are not like the embedded one."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, spawn
from tests.runner import models
from tests.runner.plain_models import build, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("lfm2"), tmp_path_factory.mktemp("models") / "tiny-lfm2")


def test_serve_says_that_nothing_is_reused_and_why(folder: Path) -> None:
    process = spawn("serve", str(folder), "--port", "0", "--device", "cpu")
    lines: list[str] = []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            lines.append(line)
            if "Listening on" in line:
                break
    finally:
        process.kill()
        process.wait(30)
    said = [
        line for line in lines if line.startswith("Prefixes of this model are not reused: 2 of its 4 layers (conv)")
    ]
    assert len(said) == 1, "".join(lines)
    assert any("up to 64 requests at once" in line for line in lines)
    assert any("WARNING" in line and "every prompt is computed whole" in line for line in lines)


def test_identity_prints_every_ingredient(folder: Path, cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("identity", str(folder), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["ingredients"]) == {
        "adapter",
        "architecture",
        "arithmetic",
        "attention",
        "code",
        "config",
        "dtype",
        "format",
        "kv_dtype",
        "library",
        "quantisation",
        "weights",
    }
    assert cli("identity", str(folder)) == 0
    printed = capsys.readouterr().out
    assert all(name in printed and value in printed for name, value in found["ingredients"].items())
    assert found["root"] in printed
    assert found["not_cacheable"].startswith("2 of its 4 layers (conv)")
    assert "not reused: 2 of its 4 layers" in printed


def test_identity_names_another_root_for_another_block_size(
    tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, roots = save(models.build(models.CONFIGS["qwen3"]()), tmp_path), list[str]()
    for block_size in ("16", "16", "32"):
        assert cli("identity", str(folder), "--json", "--block-size", block_size) == 0
        found = json.loads(capsys.readouterr().out)
        roots.append(found["root"])
        assert found["not_cacheable"] is None
    assert roots[0] == roots[1] != roots[2]
