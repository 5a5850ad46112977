"""Compiling what was written, for the processor at hand, and running it on torch's own threads."""

import ctypes
import importlib
import platform
import sys
from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,  # pyright: ignore[reportPrivateUsage]  nothing public says who listens
)

from foreword.runner.shelf import NOWHERE, Shelf

Job = ctypes.Array[ctypes.c_int64]
"""What a kernel is given: integers and addresses."""
NEXT, ROWS = 0, 1
"""Places that every job has: the next item of work, which workers count up, and how many rows there are."""
_ARCH_PRCTL, _ASK_FOR_FEATURE, _TILE_DATA = 158, 0x1023, 18
"""Linux on x86-64: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)."""
_FUTEX: Mapping[str, int] = {"x86_64": 202, "aarch64": 98}
"""By processor."""
_LEVEL = 3
"""How much is optimised."""


@cache
def _llvm() -> Any:
    llvm = cast(Any, importlib.import_module("llvmlite.binding"))
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


def is_there() -> bool:
    """Whether LLVM can be had as a library."""
    try:
        return bool(_llvm())
    except (ImportError, OSError):
        return False


@cache
def multiplies_tiles() -> bool:
    """Whether the processor multiplies tiles of bfloat16 (AMX_BF16), and the system lets this process do so."""
    if not _llvm().get_host_cpu_features().get("amx-bf16") or sys.platform != "linux":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK_FOR_FEATURE, _TILE_DATA) == 0


def is_x86() -> bool:
    """Whether the processor is one of the x86-64 family."""
    return _host()["triple"].startswith("x86_64")


class Witness(TorchDispatchMode):
    """Whoever is told of each launch in its thread, in the place of it, beside each operation of torch."""

    def launched(self, code: "Compiled", job: Job, rows: Sequence[int], brief: int, threads: int) -> None:
        """Take note of what was to run, with the job as it is now; the rest is as `Compiled.run` has it."""
        raise NotImplementedError


class Compiled:
    """A module's function `work(job)`, as machine code."""

    def __init__(self, name: str, text: str, shelf: Shelf = NOWHERE) -> None:
        """Take it from the shelf, or compile it, which takes some tenths of a second; `name` is for people."""
        self.name = name
        llvm, host = _llvm(), _host()
        target = llvm.Target.from_triple(host["triple"]).create_target_machine(
            opt=_LEVEL, cpu=host["cpu"], features=host["features"]
        )
        key = sha256("\n".join((*host.values(), text)).encode()).hexdigest()
        code = shelf.find(key)
        if code is None:
            code = _compile(text, target)
            shelf.put(key, code)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self.address = self._engine.get_function_address("work")
        """Where the function begins."""
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)
        self._brief = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(self.address)

    def run(self, job: Job, rows: Sequence[int] = (), brief: int = 0, *, threads: int | None = None) -> None:
        """Call it on all of torch's threads at once, or on so many; returns when all have returned.

        `rows` are the sizes that the job's rows come from, the outermost first. Up to `brief` rows are over at once:
        they run on this thread alone, and nobody else runs Python meanwhile.
        """
        threads = threads or torch.get_num_threads()
        witness = _get_current_dispatch_mode()
        if isinstance(witness, Witness):
            return witness.launched(self, job, rows, brief, threads)
        team = _team()
        if job[ROWS] <= brief:
            self._brief(ctypes.addressof(job))
        elif threads == 1 or team is None:
            self._alone(ctypes.addressof(job))
        else:
            team.GOMP_parallel(self.address, ctypes.addressof(job), threads, 0)
        return None


def _compile(text: str, target: Any) -> bytes:
    """An object file."""
    llvm = _llvm()
    module = llvm.parse_assembly(text)
    module.verify()
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=_LEVEL))
    passes.getModulePassManager().run(module, passes)
    return target.emit_object(module)


@cache
def _host() -> Mapping[str, str]:
    """What machine code depends on beside its text: the processor at hand, and who compiles for it, and how."""
    llvm, package = _llvm(), importlib.import_module("llvmlite")
    return {
        "triple": llvm.get_default_triple(),
        "cpu": llvm.get_host_cpu_name(),
        "features": llvm.get_host_cpu_features().flatten(),
        "compiler": f"llvmlite {package.__version__}, LLVM {llvm.llvm_version_info}, level {_LEVEL}",
    }


def new_job(fields: type[IntEnum]) -> Job:
    """An empty job with these fields."""
    return (ctypes.c_int64 * len(fields))()


@cache
def _team() -> Any:
    """Torch's OpenMP library, whose teams are the threads that torch uses itself. None: there is no such."""
    for file in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        library = ctypes.CDLL(str(file))
        library.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        library.GOMP_parallel.restype = None
        return library
    return None


@cache
def team_size_address() -> int:
    """Of a function that says in each thread of a team how many there are. 0: there are no teams."""
    return 0 if _team() is None else _address(_team().omp_get_num_threads)


@cache
def system_address() -> int:
    """Of C's `syscall`."""
    return _address(ctypes.CDLL(None).syscall)


def futex_number() -> int | None:
    """What to tell the system to sleep until another thread wakes this one. None: not known here."""
    return _FUTEX.get(platform.machine()) if sys.platform == "linux" else None


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
