"""The floors of docs/design.md, as import-linter's contracts in pyproject.toml; and each contract can fail."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, ROOT


def lint(source: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts against the package below this folder."""
    lint_imports = Path(sys.executable).with_name("lint-imports")
    command = [str(lint_imports), "--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    return subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)


def test_arrows_only_go_down() -> None:
    checked = lint(ROOT / "src")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("cache/identity.py", "import foreword.schedule.plan", "Floors"),
        ("schedule/plan.py", "import foreword.engine.sockets", "Floors"),
        ("text/__init__.py", "import foreword.runner", "Floors"),
        ("engine/sockets.py", "def f():\n    import foreword.testing", "Floors"),
        ("front/ask.py", "import torch", "torch lives in runner"),
        ("front/ask.py", "from transformers import AutoTokenizer", "transformers lives in runner"),
        ("front/ask.py", "import fastapi", "HTTP lives in server"),
        ("engine/stream.py", "import numpy", "The heart and the loop"),
    ],
)
def test_an_arrow_up_is_found(tmp_path: Path, module: str, line: str, contract: str) -> None:
    shutil.copytree(PACKAGE, tmp_path / "foreword", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "foreword" / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    checked = lint(tmp_path)
    broken = [text for text in checked.stdout.splitlines() if text.startswith(contract)]
    assert checked.returncode == 1, checked.stdout + checked.stderr
    assert any("BROKEN" in text for text in broken), checked.stdout


def test_a_room_without_a_floor_is_found(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "foreword", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "foreword" / "attic").mkdir()
    (tmp_path / "foreword" / "attic" / "__init__.py").touch()
    checked = lint(tmp_path)
    assert checked.returncode == 1
    assert "attic" in checked.stdout
