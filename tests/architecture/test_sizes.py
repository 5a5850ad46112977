"""Nothing is so large that it hides a second idea: modules, classes, functions, parameters, unmapped folders."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, listed, place, python_files, read

MODULE_LINES = 500
CLASS_LINES = 400
FUNCTION_LINES = 60
PARAMETERS = 6
FILES_WITHOUT_README = 5
README_LINES = 40

SOURCE = tuple(python_files("src"))
EVERYTHING = (*SOURCE, *python_files("tests", "examples", "benchmarks", "scripts"))


def too_large(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and (lines := length(node)) > CLASS_LINES:
            yield node.lineno, f"class {node.name} has {lines} lines, {CLASS_LINES} are allowed"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (lines := length(node)) > FUNCTION_LINES:
            yield node.lineno, f"{node.name}() has {lines} lines, {FUNCTION_LINES} are allowed"


def too_many_parameters(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            args = node.args
            names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
            num = len(names) - (names[:1] in (["self"], ["cls"])) + (args.vararg is not None) + (args.kwarg is not None)
            if num > PARAMETERS:
                name = "lambda" if isinstance(node, ast.Lambda) else f"{node.name}()"
                yield node.lineno, f"{name} has {num} parameters, {PARAMETERS} are allowed"


def length(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def folders_without_map(package: Path) -> Iterator[str]:
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        readme = folder / "README.md"
        if readme.exists() and len(readme.read_text(encoding="utf-8").splitlines()) > README_LINES:
            yield f"{readme} has more than {README_LINES} lines"
        elif len(files) > FILES_WITHOUT_README and not readme.exists():
            yield f"{folder} has {len(files)} files and no README.md that says what goes where"


def test_modules() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in EVERYTHING}
    assert not listed(f"{place(path, 1)}: {num} lines" for path, num in lines.items() if num > MODULE_LINES)


def test_classes_and_functions() -> None:
    assert not listed(f"{place(path, line)}: {what}" for path in EVERYTHING for line, what in too_large(read(path)))


def test_parameters() -> None:
    found = ((path, *found) for path in SOURCE for found in too_many_parameters(read(path)))
    assert not listed(f"{place(path, line)}: {what}" for path, line, what in found)


def test_a_large_folder_has_a_map() -> None:
    assert not listed(folders_without_map(PACKAGE))


@pytest.mark.parametrize(("header", "limit"), [("def f():", FUNCTION_LINES), ("class C:", CLASS_LINES)])
def test_one_line_too_many_is_found(header: str, limit: int) -> None:
    body = "\n".join([header, *["    x = 1"] * (limit - 1)])
    assert list(too_large(ast.parse(body))) == []
    assert list(too_large(ast.parse(body + "\n    x = 2")))


@pytest.mark.parametrize(
    ("signature", "fine"),
    [
        ("def f(a, b, c, d, e, f): ...", True),
        ("def f(a, b, c, d, e, f, g): ...", False),
        ("class C:\n    def f(self, a, b, c, /, d, *, e, f): ...", True),
        ("class C:\n    def f(self, a, b, c, /, d, *, e, f, g): ...", False),
        ("def f(a, b, c, d, e, *args, **kwargs): ...", False),
    ],
)
def test_one_parameter_too_many_is_found(signature: str, fine: bool) -> None:
    assert (list(too_many_parameters(ast.parse(signature))) == []) is fine


def test_a_large_folder_without_a_map_is_found(tmp_path: Path) -> None:
    for i in range(FILES_WITHOUT_README):
        (tmp_path / f"m{i}.py").touch()
    (tmp_path / "__init__.py").touch()
    assert list(folders_without_map(tmp_path)) == []
    (tmp_path / "one_more.py").touch()
    assert list(folders_without_map(tmp_path))
    (tmp_path / "README.md").write_text("what lives here\n" * README_LINES)
    assert list(folders_without_map(tmp_path)) == []
    (tmp_path / "README.md").write_text("too long\n" * (README_LINES + 1))
    assert list(folders_without_map(tmp_path))
