"""Write docs/settings.md from the docstrings in `foreword.base.config`; with --check, only compare."""

import ast
import dataclasses
import inspect
import sys
import types
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from foreword.base import config

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
HEAD = """\
# Settings

Made by `make docs` from the docstrings in `src/foreword/base/config.py`; a test keeps it up to date.

Every setting has one name. On the command line it is a flag with dashes (`foreword serve --block-size 32`), in Python
an argument with underscores (`LLM(model, block_size=32)`). An unknown name is an error that says so, and so is a
value out of range or two settings that contradict each other. `foreword serve --help` prints the same texts.
"""


def main() -> int:
    """Write or check the page; the exit status."""
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        print("docs/settings.md is out of date: run `make docs`")
        return 1
    return 0


def page() -> str:
    """The whole page."""
    sections = get_type_hints(config.Config)
    tables = ("\n".join(table(name, section)) for name, section in sections.items())
    return "\n".join((HEAD, *tables))


def table(title: str, section: type[Any]) -> Iterator[str]:
    """One section's heading and table."""
    texts, hints = field_docstrings(section), get_type_hints(section)
    yield f"## {title.capitalize()}\n"
    yield f"{inspect.getdoc(section)}\n"
    yield "| Flag | Value | Default | |"
    yield "|---|---|---|---|"
    for field in dataclasses.fields(section):
        value, default = kind(hints[field.name]), str(field.default)
        flag = "--" + field.name.replace("_", "-")
        if hints[field.name] is bool and field.default is True:
            flag, default, value = f"--no-{flag[2:]}", "off", "none"
        elif hints[field.name] is bool:
            default, value = "off", "none"
        elif field.default is None:
            default = "none"
        flag = "`MODEL` (first argument)" if field.name == "model" else f"`{flag}`"
        yield f"| {flag} | {value} | {default} | {texts[field.name]} |"
    yield ""


def kind(hint: Any) -> str:
    """A type in a reader's words."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{word}`" for word in get_args(hint))
    if get_origin(hint) in {Union, types.UnionType}:
        return " or ".join(kind(arg) for arg in get_args(hint) if arg is not type(None))
    return {str: "text", int: "whole number", float: "number", bool: "none"}.get(
        hint, getattr(hint, "__name__", str(hint))
    )


def field_docstrings(section: type[Any]) -> dict[str, str]:
    """Field name -> the string that stands under it."""
    (parsed,) = (node for node in ast.parse(inspect.getsource(section)).body if isinstance(node, ast.ClassDef))
    texts: dict[str, str] = {}
    for field, below in pairwise(parsed.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            if not isinstance(below, ast.Expr) or not isinstance(below.value, ast.Constant):
                raise SystemExit(f"{section.__name__}.{field.target.id} has no docstring")
            texts[field.target.id] = " ".join(str(below.value.value).split()).replace("|", "\\|")
    return texts


if __name__ == "__main__":
    sys.exit(main())
