"""What `transformers` is made of, kept from one start to the next.

The library learns which of its files holds which name by reading all 2,400 of them, twice in each start: 0.4 s each
time (5.24). What it learned is put on a shelf, under a digest of every such file's path, size and times: if one is
changed, added or removed, it reads them again. Where anything is not as expected, it reads as ever.

Other users of the library in the same process might not want that: it is for the command line.
"""

import json
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import cast

from foreword.runner.shelf import Shelf

_MODULE, _FUNCTION = "transformers.utils.import_utils", "define_import_structure"
_FORMAT = "catalogue 1"

Contents = dict[frozenset[str], dict[str, set[str]]]
"""Packages that are needed -> modules -> names in them."""
_Read = Callable[[str | Path, str | None], Contents]


@contextmanager
def catalogue_on(shelf: Shelf) -> Generator[None]:
    """Have the library look on this shelf for what it is made of, if it is imported in here."""
    finder = _Finder(shelf)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


class Catalogue:
    """Stands in for the library's function that reads a folder of modules."""

    def __init__(self, read: _Read, reader: Path, shelf: Shelf) -> None:
        """`reader` is the file in which `read` stands: another version may find other things."""
        self._read = read
        self._reader = reader
        self._folder = reader.parents[1] / "models"
        self._shelf = shelf

    def __call__(self, module_path: str | Path, prefix: str | None = None) -> Contents:
        """What a folder holds, or the one that a file lies in; modules' names begin with the prefix."""
        place = Path(module_path)
        if (place if place.is_dir() else place.parent) != self._folder:
            return self._read(module_path, prefix)
        try:
            key = self._key(prefix)
        except OSError:  # a link to nothing, for one, which the library need not open
            return self._read(module_path, prefix)
        kept = self._shelf.find(key)
        if kept is not None:
            return _decode(kept)
        found = self._read(module_path, prefix)
        try:
            text = _encode(found)
        except (AttributeError, TypeError):  # it learns other things now
            return found
        if _decode(text) == found:
            self._shelf.put(key, text)
        return found

    def _key(self, prefix: str | None) -> str:
        return sha256(json.dumps((_FORMAT, prefix, self._state)).encode()).hexdigest()

    @cached_property
    def _state(self) -> tuple[object, ...]:
        """What may be read, looked at once in a start."""
        reader = self._reader.stat()
        stamps = sorted(_stamps(self._folder))
        return str(self._folder), reader.st_size, reader.st_mtime_ns, reader.st_ctime_ns, stamps


def _stamps(folder: str | Path) -> Iterator[tuple[str, int, int, int]]:
    """Path, size and times of every Python file in a folder and those below it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from _stamps(entry.path)
            elif entry.name.endswith(".py"):
                status = entry.stat()
                yield entry.path, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _encode(contents: Contents) -> bytes:
    """In the same order, which decides between modules that have the same name in them."""
    told = [
        (sorted(needed), {module: sorted(names) for module, names in modules.items()})
        for needed, modules in contents.items()
    ]
    return json.dumps(told).encode()


def _decode(text: bytes) -> Contents:
    told = cast("list[tuple[list[str], dict[str, list[str]]]]", json.loads(text))
    return {frozenset(needed): {module: set(names) for module, names in modules.items()} for needed, modules in told}


class _Finder:
    """Finds the module in which that function stands, and nothing else."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if name != _MODULE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self._shelf)
        return spec


class _Loader(SourceFileLoader):
    """Loads that module, and puts a catalogue in the function's place."""

    def __init__(self, name: str, path: str, shelf: Shelf) -> None:
        super().__init__(name, path)
        self._shelf = shelf

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib.abc.Loader`."""
        super().exec_module(module)
        read = getattr(module, _FUNCTION, None)
        if callable(read):
            setattr(module, _FUNCTION, Catalogue(cast("_Read", read), Path(self.path), self._shelf))
