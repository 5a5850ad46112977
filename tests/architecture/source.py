"""Where the source is, and its modules as syntax trees."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "foreword"
HEART = ("base", "cache", "schedule")
"""Rooms that decide. They import the standard library and each other, nothing else."""


def python_files(*folders: str) -> Iterator[Path]:
    """Every Python file below these folders of the repository; folders that do not exist hold none."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def read(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def room(path: Path) -> str:
    """`cache` for src/foreword/cache/index.py, `llm` for src/foreword/llm.py, "" for the package's own __init__."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def dotted(path: Path) -> str:
    """`foreword.cache.index` for src/foreword/cache/index.py."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def place(path: Path, line: int) -> str:
    """How a complaint names a line."""
    return f"{path.relative_to(ROOT)}:{line}"


def listed(complaints: Iterable[str]) -> str:
    """Complaints one a line; "" when there are none, so that `assert not listed(...)` shows all of them."""
    return "\n".join(complaints)
