"""Imports, PyTorch and transformers above all, while Python's garbage collector is off.

What a start makes stays, and every round of the collector that looks through it in vain takes longer than the one
before: a fifth of a start. The half a million objects of the large libraries are left out of its rounds for good, so
that a full one while the server runs takes 0.03 seconds instead of 0.25.

The collector is the process's, so this is for the command line, whose process is its own; `LLM` leaves it alone.
"""

import atexit
import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module

from foreword.runner.catalogue import catalogue_on
from foreword.runner.shelf import Shelf, cache_folder

_ROOM = "foreword.runner.loader"


@contextmanager
def uncollected() -> Generator[None]:
    """Keep the collector off, for work that makes what stays."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def import_libraries(cache_dir: str | None = None) -> None:
    """Import what a model needs, unless it is there, and leave it out of all further rounds.

    The model itself comes later: one that is loaded again must not be kept for good.
    """
    if _ROOM in sys.modules:
        return
    with uncollected(), catalogue_on(Shelf(cache_folder(cache_dir) / "library")):
        from foreword.runner.sparing import spare  # PyTorch: a second

        spare()
        import_module(_ROOM)
        gc.freeze()
    atexit.register(gc.unfreeze)  # extension modules complain of what is left at the end
