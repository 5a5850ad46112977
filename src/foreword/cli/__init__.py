"""The command line: one file per verb. The only room that reads the process's environment.

Importing this loads no torch, and neither does `--help`.
"""

import os
import sys

from foreword.base.errors import ForewordError

__all__ = ["main"]


def main() -> int:
    """Run `foreword` with the process's arguments; the exit status: 0, 2 for an error that a person can mend."""
    from foreword.cli.verbs import parse  # after the name is known to be ours: a library user never pays for it

    _quieten()
    try:
        return parse(sys.argv[1:]).run()
    except ForewordError as error:
        print(f"foreword: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone; give Python's own flush at exit something that takes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _quieten() -> None:
    """Libraries speak only when something is wrong, unless the operator told them otherwise."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
