"""The command line: one file per verb. The only room that reads the process's environment.

Importing this loads no torch, and neither does `--help`.
"""

import os
import sys

from foreword.base.errors import ForewordError
from foreword.cli.libraries import uncollected

__all__ = ["main"]


def main() -> int:
    """Run `foreword` with the process's arguments; the exit status: 0, 2 for an error that a person can mend."""
    _set_defaults()
    try:
        with uncollected():
            from foreword.cli.verbs import parse  # after the name is known to be ours: a library user never pays for it

            verb = parse(sys.argv[1:])
        return verb.run()
    except ForewordError as error:
        print(f"foreword: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone; give Python's own flush at exit something that takes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _set_defaults() -> None:
    """What libraries read when they are loaded, unless the operator has said something else."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # they speak only when something is wrong
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Threads of a matrix product that wait by spinning keep the cores from whoever they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
