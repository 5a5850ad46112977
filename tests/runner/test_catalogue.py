"""What the library is made of: read once, believed only while nothing has changed, never in anybody's way."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from foreword.runner.catalogue import Catalogue, Contents, catalogue_on
from foreword.runner.shelf import Shelf

FOUND: Contents = {
    frozenset({"torch", "tokenizers"}): {"b.modeling_b": {"B", "Both"}, "a.modeling_a": {"A", "Both"}},
    frozenset(): {"a.configuration_a": set()},
}


class Library:
    """A library with a folder of models, whose reader is asked, or its catalogue."""

    def __init__(self, folder: Path) -> None:
        self.models = folder / "lib" / "models"
        self.reader = folder / "lib" / "utils" / "import_utils.py"
        for file in (self.reader, self.models / "__init__.py", self.models / "a" / "modeling_a.py"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("A = 1\n")
        self.num_read = 0
        self.found: object = FOUND
        self.shelf = Shelf(folder / "shelf")

    def read(self, path: str | Path, prefix: str | None = None) -> Contents:
        del path
        self.num_read += 1
        return {frozenset(): {str(prefix): set()}} if prefix else cast("Contents", self.found)

    def start(self) -> Catalogue:
        """As a new process begins."""
        return Catalogue(self.read, self.reader, self.shelf)


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path)


def test_it_is_read_once_for_all_starts(library: Library) -> None:
    for path in (library.models, str(library.models / "__init__.py")):
        found = library.start()(path)
        assert found == FOUND
        assert [list(modules) for modules in found.values()] == [list(modules) for modules in FOUND.values()]
        assert library.num_read == 1
    assert library.start()(library.models, "models") == {frozenset(): {"models": set()}}
    assert library.start()(library.models, "models") == {frozenset(): {"models": set()}}
    assert library.num_read == 2
    found[frozenset()].clear()  # as the library does with what it was given
    assert library.start()(library.models) == FOUND


def test_other_folders_are_read_as_ever(library: Library) -> None:
    for _ in range(2):
        library.start()(library.models / "a")
        library.start()(str(library.models / "a" / "__init__.py"))
    assert library.num_read == 4
    assert not library.shelf.folder or not library.shelf.folder.exists()


@pytest.mark.parametrize("change", ["touched", "longer", "added", "removed", "renamed", "another reader"])
def test_a_change_has_it_read_again(library: Library, change: str) -> None:
    library.start()(library.models)
    one = library.models / "a" / "modeling_a.py"
    match change:
        case "touched":
            os.utime(one, ns=(0, one.stat().st_mtime_ns + 1))
        case "longer":
            stamp = one.stat().st_mtime_ns
            one.write_text("A = 10\n")
            os.utime(one, ns=(0, stamp))
        case "added":
            (library.models / "b.py").write_text("")
        case "removed":
            one.unlink()
        case "renamed":
            one.rename(one.with_name("modeling_c.py"))
        case _:
            os.utime(library.reader, ns=(0, library.reader.stat().st_mtime_ns + 1))
    library.found = {frozenset(): {"new": {"New"}}}
    assert library.start()(library.models) == library.found
    assert library.start()(library.models) == library.found
    assert library.num_read == 2


def test_what_plays_no_part_changes_nothing(library: Library) -> None:
    library.start()(library.models)
    (library.models / "a" / "__pycache__").mkdir()
    (library.models / "a" / "__pycache__" / "modeling_a.py").write_text("")
    (library.models / "a" / "notes.md").write_text("")
    assert library.start()(library.models) == FOUND
    assert library.num_read == 1


@pytest.mark.parametrize(
    "found", [{frozenset(): {"a": None}}, {frozenset(): [1]}, {1: {}}, {frozenset({"x"}): {1: {"A"}}}]
)
def test_what_is_not_understood_is_handed_on_and_not_kept(library: Library, found: object) -> None:
    library.found = found
    for _ in range(2):
        assert library.start()(library.models) is found
    assert library.num_read == 2


def test_what_cannot_be_looked_at_is_read_as_ever(library: Library) -> None:
    (library.models / "a" / "convert_a.py").symlink_to("/nowhere/at/all")
    for _ in range(2):
        assert library.start()(module_path=library.models) == FOUND
    assert library.num_read == 2


def test_nobody_looks_for_the_library_when_its_import_is_over(library: Library) -> None:
    before = list(sys.meta_path)
    during = list[object]()

    def fail() -> None:
        with catalogue_on(library.shelf):
            during.extend(sys.meta_path)
            raise ImportError

    with pytest.raises(ImportError):
        fail()
    assert len(during) == len(before) + 1
    assert sys.meta_path == before


def test_a_spoilt_file_is_as_good_as_none(library: Library) -> None:
    library.start()(library.models)
    assert library.shelf.folder is not None
    (file,) = library.shelf.folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    assert library.start()(library.models) == FOUND
    assert library.num_read == 2
    assert file.read_bytes() == whole


STARTED = """
import json, sys
from pathlib import Path
from contextlib import nullcontext
from foreword.runner.catalogue import catalogue_on
from foreword.runner.shelf import Shelf
read = []
sys.addaudithook(lambda event, given: read.append(str(given[0])) if event == "open" else None)
with nullcontext() if sys.argv[1] == "none" else catalogue_on(Shelf(Path(sys.argv[1]))):
    import transformers
from transformers.models import llama
places = {name: module for name, module in sorted(transformers._class_to_module.items())}
models = sys.modules["transformers.models"]
inner = {name: module for name, module in sorted(models._class_to_module.items())}
num_read = sum("/models/" in name and name.endswith(".py") for name in read)
from transformers import LlamaConfig
hooks = [hook for hook in sys.meta_path if type(hook).__module__.startswith("foreword")]
print(json.dumps([places, inner, num_read, len(hooks), LlamaConfig().model_type]))
"""


def started(shelf: str) -> tuple[dict[str, str], dict[str, str], int, int, str]:
    command = [sys.executable, "-c", STARTED, shelf]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)


def test_the_library_is_what_it_is_without(tmp_path: Path) -> None:
    plain, first, second = started("none"), started(str(tmp_path)), started(str(tmp_path))
    assert len(plain[0]) > 1000
    assert plain[:2] == first[:2] == second[:2]
    assert plain[2] == first[2] > 2000
    assert second[2] < 50
    assert [one[3:] for one in (plain, first, second)] == [[0, "llama"]] * 3
