"""Machine code is kept from one start to the next: only whole, and only what nobody else can have written."""

import ctypes
import logging
import os
from pathlib import Path

import pytest

from foreword.runner.native import machine
from foreword.runner.shelf import NOWHERE, Shelf

STORES = """
define void @work(ptr %job) {{
  store i64 {number}, ptr %job
  ret void
}}
"""


def stores(number: int, shelf: Shelf) -> int:
    """What a kernel leaves in its job that is written to leave this number."""
    job = (ctypes.c_int64 * 2)(0, 1)
    machine.Compiled("stores", STORES.format(number=number), shelf).run(job)
    return job[0]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "kernels")


def files(shelf: Shelf) -> list[Path]:
    assert shelf.folder is not None
    return sorted(shelf.folder.iterdir())


def test_what_was_compiled_once_is_taken_from_the_shelf(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (stores(1, shelf), stores(2, shelf)) == (1, 2)
    assert len(files(shelf)) == 2
    monkeypatch.setattr(machine, "_compile", lambda *_: pytest.fail("it is compiled again"))
    assert (stores(1, shelf), stores(2, shelf)) == (1, 2)


def test_code_under_the_name_of_another_is_compiled_anew(shelf: Shelf) -> None:
    stores(1, shelf)
    (one,) = files(shelf)
    stores(2, shelf)
    (two,) = set(files(shelf)) - {one}
    whole = one.read_bytes()
    one.write_bytes(two.read_bytes())
    assert (stores(1, shelf), stores(2, shelf)) == (1, 2)
    assert one.read_bytes() == whole != two.read_bytes()


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(shelf: Shelf) -> None:
    stores(1, shelf)
    (file,) = files(shelf)
    whole = file.read_bytes()
    file.unlink()
    os.mkfifo(file, 0o600)
    assert stores(1, shelf) == 1
    assert file.read_bytes() == whole


def test_what_cannot_be_put_in_its_place_leaves_nothing_behind(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    stores(1, shelf)
    (file,) = files(shelf)
    file.unlink()
    (file / "of somebody").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        assert stores(1, shelf) == 1
    assert "nothing is kept" in caplog.text
    assert files(shelf) == [file]


def test_code_of_another_processor_is_not_ours(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    stores(1, shelf)
    host = dict(machine._host())
    monkeypatch.setattr(machine, "_host", lambda: {**host, "compiler": "another one"})
    assert stores(1, shelf) == 1
    assert len(files(shelf)) == 2


@pytest.mark.parametrize("keep", [0, 31, 32, 100, -1])
def test_a_torn_file_is_compiled_anew(shelf: Shelf, keep: int) -> None:
    stores(1, shelf)
    (file,) = files(shelf)
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    assert stores(1, shelf) == 1
    assert file.read_bytes() == whole


def test_a_file_that_others_may_write_to_is_not_run(shelf: Shelf) -> None:
    stores(1, shelf)
    stores(2, shelf)
    one, two = files(shelf)
    changed = one.read_bytes(), two.read_bytes()
    for file, content in zip((one, two), reversed(changed), strict=True):
        file.write_bytes(content)
        file.chmod(0o666)
    assert (stores(1, shelf), stores(2, shelf)) == (1, 2)
    assert (one.read_bytes(), two.read_bytes()) == changed
    assert {file.stat().st_mode & 0o777 for file in files(shelf)} == {0o600}


def test_a_folder_that_cannot_be_written_to_costs_time_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "kernels").write_text("a file")
    with caplog.at_level(logging.WARNING):
        shelf = Shelf(tmp_path / "kernels")
        assert (stores(1, shelf), stores(2, shelf)) == (1, 2)
    assert len(caplog.messages) == 1, "once, however many kernels there are"
    assert caplog.messages[0].startswith(f"nothing is kept in {tmp_path / 'kernels'}: ")


def test_nothing_is_kept_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert stores(1, NOWHERE) == 1
    assert not list(tmp_path.iterdir())
