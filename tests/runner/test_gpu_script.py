"""benchmarks/gpu.py runs through where there is no card, with every section in its table."""

import json
import subprocess
import sys
from pathlib import Path

from tests.architecture.source import ROOT


def test_every_section_runs(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--smoke", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "rows.json").read_text())
    assert found["failed"] == []
    names = "\n".join(name for name, _, _ in found["rows"])
    for part in (
        "copy",
        "product",
        "error",
        "decode attention",
        "TTFT cold",
        "TTFT warm",
        "offline mix",
        "8B",
        "two under way",
        "shared",
    ):
        assert part in names
    rows = {name: value for name, value, _ in found["rows"]}
    assert rows["2 x 3 requests, prefix of 48, shared: tokens reused"] > 0
    assert rows["2 x 3 requests, prefix of 48, unshared: tokens reused"] == 0
