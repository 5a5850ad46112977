"""What changes KV, collected as ingredients of block identity. `cache.identity` turns them into a hash.

Nothing here goes by a name: weights count by their bytes, code by its version, hardware by what it computes with. Two
checkpoints of one name are two models, and one checkpoint under two names is one.
"""

import json
import logging
import os
import tempfile
from collections.abc import Mapping
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

_CHUNK = 1 << 22


def ingredients(model: nn.Module, directory: Path | None, memo: Path, computing: Mapping[str, str]) -> dict[str, str]:
    """Everything that changes KV, by name.

    `directory` holds the weights' files; None for a model that was made in memory. `memo` is a file in which digests
    are remembered. `computing` says how products are made: backend, dtypes, tiles.
    """
    config = library.config_of(model)
    weights = state_digest(model) if directory is None else weights_digest(directory, memo)
    return {
        "weights": weights,
        "architecture": type(model).__name__,
        "config": config_digest(library.config_fields(config)),
        "library": f"transformers {library.VERSION}, torch {torch.__version__}",
        "arithmetic": arithmetic(next(model.parameters())),
        **computing,
    }


def weights_digest(directory: Path, memo: Path) -> str:
    """One digest over the contents of all weight files of a directory; their names and order play no part."""
    files = sorted(p for pattern in ("*.safetensors", "*.bin") for p in directory.glob(pattern))
    if not files:
        raise FileNotFoundError(f"{directory} holds no weights")
    digests = sorted(_file_digests(files, memo))
    return sha256("".join(digests).encode()).hexdigest()


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
    """SHA-256 of each file, taken from the memo where path, size, time and inode are those remembered."""
    known = _read_memo(memo)
    fresh: dict[str, str] = {}
    digests: list[str] = []
    for file in files:
        status = file.stat()
        key = f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
        digest = known.get(key)
        if digest is None:
            digest = fresh[key] = _hash_file(file)
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
