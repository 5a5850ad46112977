"""PyTorch and transformers, imported while Python's garbage collector is off.

Their modules are half a million objects that all stay, and every round of the collector that looks through them in
vain takes longer than the one before: a fifth of a start. Afterwards they are left out of its rounds for good, so that
a full one while the server runs takes 0.03 seconds instead of 0.25.

The collector is the process's, so this is for the command line, whose process is its own; `LLM` leaves it alone.
"""

import atexit
import gc
import sys
from importlib import import_module

_ROOM = "foreword.runner.loader"


def import_libraries() -> None:
    """Import what a model needs, unless it is there.

    The model itself comes later: one that is loaded again must not be kept for good.
    """
    if _ROOM in sys.modules:
        return
    was_on = gc.isenabled()
    gc.disable()
    try:
        import_module(_ROOM)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # extension modules complain of what is left at the end
        if was_on:
            gc.enable()
