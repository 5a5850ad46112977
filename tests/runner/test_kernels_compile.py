"""The kernels compile for cards, on a machine that has none."""

import os
import subprocess
import sys

from tests.architecture.source import ROOT

ARCHITECTURE = 90
"""Compute capability: H100 and H200."""
LIMIT = 227 * 1024
"""Shared memory that one program may have there, in bytes."""


def test_for_a_card() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.runner.compile_kernels", str(ARCHITECTURE)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    attends = ["attend", "attend", "merge", "attend", "merge"]  # shared; narrow, wide, each merged with it
    assert [name for name, _, _ in lines] == ["store", *attends, "store", "attend"]
    assert all(int(shared) <= LIMIT and int(size) > 0 for _, shared, size in lines)
