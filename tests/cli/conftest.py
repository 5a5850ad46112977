"""Run the command line in this process or in one of its own."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from foreword.cli import main

Cli = Callable[..., int]

MAIN = "import sys; from foreword.cli import main; sys.argv[0] = 'foreword'; sys.exit(main())"


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`main()` with these arguments; returns the exit status."""

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["foreword", *arguments])
        try:
            return main()
        except SystemExit as end:
            return int(end.code or 0)

    return run


def spawn(*arguments: str, code: str = MAIN) -> subprocess.Popen[str]:
    """The command line in a process of its own, both outputs in one pipe."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
