"""What changes KV, collected as ingredients of block identity. `cache.identity` turns them into a hash.

Nothing here goes by a name: weights count by their bytes, code by its version, hardware by what it computes with. Two
checkpoints of one name are two models, and one checkpoint under two names is one. What cannot be keyed (embeddings in
place of token ids, masks of the caller's own, prompt tuning) is nothing that a request can bring.
"""

import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from foreword.runner import library

_log = logging.getLogger(__name__)

_NOISE = frozenset(
    {
        "_name_or_path",
        "_model_name_or_path",
        "transformers_version",
        "architectures",
        "torch_dtype",
        "dtype",
        "use_cache",
    }
)
"""Fields of a configuration that say where it came from, or what others already say better."""

_ADAPTER_NOISE = frozenset({"base_model_name_or_path", "revision", "inference_mode"})

_FORMAT = "1"
"""Raised when what a block holds, or where in it, is no longer what it was."""

_NONE = "none"
_CHUNK = 1 << 22
_SETTLED_NS = 2 * 10**9
"""A file this much older than its digest has not been written to in the same tick of the file system's clock."""


def ingredients(model: nn.Module, directory: Path | None, memo: Path, computing: Mapping[str, str]) -> dict[str, str]:
    """Everything that changes KV, by name.

    `directory` holds the weights' files; None for a model that was made in memory. `memo` is a file in which digests
    are remembered. `computing` says how products are made: backend, dtypes, tiles.
    """
    config = library.config_of(model)
    weights = state_digest(model) if directory is None else weights_digest(directory, memo)
    return {
        "format": _FORMAT,
        "weights": weights,
        "adapter": _NONE,
        "code": _NONE if directory is None else code_digest(directory, memo),
        "quantisation": quantisation_digest(config),
        "architecture": type(model).__name__,
        "config": config_digest(library.config_fields(config)),
        "library": f"transformers {library.VERSION}, torch {torch.__version__}",
        "arithmetic": arithmetic(next(model.parameters())),
        **computing,
    }


def weights_digest(directory: Path, memo: Path) -> str:
    """One digest over the contents of all weight files of a directory; their names and order play no part."""
    files = _weight_files(directory)
    if not files:
        raise FileNotFoundError(f"{directory} holds no weights")
    return _together(_file_digests(files, memo))


def adapter_digest(directory: Path, scaling: float, memo: Path) -> str:
    """One digest over an adapter's weights, its configuration and the scale it is applied with; never its name."""
    fields = cast("Mapping[str, Any]", json.loads((directory / "adapter_config.json").read_text("utf-8")))
    own = {key: value for key, value in fields.items() if key not in _ADAPTER_NOISE}
    return _together([weights_digest(directory, memo), config_digest(own), float(scaling).hex()])


def code_digest(directory: Path, memo: Path) -> str:
    """One digest over all Python files of a model's directory; "none" without any. They are never run here."""
    files = sorted(directory.glob("*.py"))
    return _together(_file_digests(files, memo)) if files else _NONE


def quantisation_digest(config: library.Config) -> str:
    """How weights are packed, as a digest of all that the configuration says about it; "none" when they are not."""
    found: object = getattr(config, "quantization_config", None)
    if found is None:
        return _NONE
    ask = getattr(found, "to_dict", None)
    fields: object = ask() if callable(ask) else found
    return config_digest({"quantization_config": fields})


def stamps(directory: Path) -> tuple[tuple[str, int, int, int, int], ...]:
    """What tells whether a model's files were written to: name, size, times and inode of each."""
    files = (*_weight_files(directory), *sorted(directory.glob("*.json")))
    found = ((file.name, file.stat()) for file in files)
    return tuple(
        (name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino) for name, status in found
    )


def _weight_files(directory: Path) -> list[Path]:
    patterns = ("*.safetensors", "*.safetensors.index.json", "*.bin")
    return sorted(file for pattern in patterns for file in directory.glob(pattern))


def _together(digests: Iterable[str]) -> str:
    return sha256("".join(sorted(digests)).encode()).hexdigest()


def state_digest(model: nn.Module) -> str:
    """A digest over a model in memory: each tensor's name, dtype, shape and bytes."""
    total = sha256()
    for name, tensor in sorted(cast("dict[str, torch.Tensor]", model.state_dict()).items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(raw_bytes(tensor))
    return total.hexdigest()


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's elements as they lie in memory, in order."""
    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return memoryview(cast(Any, flat.numpy()))


def config_digest(fields: Mapping[str, Any]) -> str:
    """A digest over a configuration, nested ones included, less its noise."""
    return sha256(json.dumps(_quiet(fields), sort_keys=True, default=str).encode()).hexdigest()


def _quiet(value: object) -> object:
    if isinstance(value, Mapping):
        fields = cast("Mapping[object, object]", value)
        return {str(key): _quiet(inner) for key, inner in fields.items() if key not in _NOISE}
    if isinstance(value, (list, tuple)):
        return [_quiet(inner) for inner in cast("list[object]", value)]
    return value


def arithmetic(weight: torch.Tensor) -> str:
    """How the device at hand computes, told by what comes out: those that agree in every bit agree here.

    The number of threads is told as well, since it decides how long sums are split.
    """
    line = torch.linspace(-3, 3, 64 * 576, device=weight.device)
    left, right = line.view(64, 576).to(weight.dtype), line.flip(0).view(64, 576).to(weight.dtype)
    product = torch.nn.functional.linear(left, right)
    bent = torch.nn.functional.silu(torch.softmax(product, dim=-1))
    digest = sha256(bytes(raw_bytes(product)) + bytes(raw_bytes(bent))).hexdigest()[:16]
    threads = f", {torch.get_num_threads()} threads" if weight.device.type == "cpu" else ""
    return f"{weight.device.type} {digest}{threads}"


def _file_digests(files: list[Path], memo: Path) -> list[str]:
    """SHA-256 of each file, taken from the memo where path, size, times and inode are those remembered.

    Whoever writes to a file may set one of its times back, but not the other one. A file that was written to just now
    is not remembered: a second write could leave all of them as they are.
    """
    known = _read_memo(memo)
    fresh: dict[str, str] = {}
    digests: list[str] = []
    for file in files:
        status, began_ns = file.stat(), time.time_ns()
        key = f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
        digest = known.get(key)
        if digest is None:
            digest = _hash_file(file)
            if max(status.st_mtime_ns, status.st_ctime_ns) + _SETTLED_NS < began_ns:
                fresh[key] = digest
        digests.append(digest)
    if fresh:
        _write_memo(memo, {**known, **fresh})
    return digests


def _hash_file(file: Path) -> str:
    total = sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            total.update(chunk)
    return total.hexdigest()


def _read_memo(memo: Path) -> dict[str, str]:
    """What is remembered; nothing when the file is missing or not ours."""
    try:
        found: object = json.loads(memo.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    entries = cast("dict[object, object]", found)
    return {key: value for key, value in entries.items() if isinstance(key, str) and isinstance(value, str)}


def _write_memo(memo: Path, digests: Mapping[str, str]) -> None:
    """Replace the memo in one move. A memo that cannot be written costs time at the next start, nothing else."""
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".digests-", dir=memo.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as opened:
            json.dump(digests, opened, indent=1)
        Path(name).replace(memo)
    except OSError as error:
        _log.warning("digests of weights are not remembered: %s", error)
