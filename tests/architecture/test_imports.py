"""What importing costs: the heart runs on a bare Python, and `import foreword` loads nothing heavy."""

import json
import subprocess
import sys

from tests.architecture.source import HEART, ROOT, dotted, python_files, room

HEAVY = {"torch", "transformers", "numpy", "fastapi", "pydantic", "uvicorn"}


def modules_after(statement: str, *options: str) -> set[str]:
    """The names of all modules that a fresh interpreter holds after a statement."""
    path = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})"
    code = f"{path}; {statement}; import json; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_the_heart_runs_without_any_installed_package() -> None:
    heart = [dotted(path) for path in python_files("src") if room(path) in HEART]
    # -S: no site-packages; an import of anything installed would fail here.
    loaded = modules_after(f"import {', '.join(heart)}", "-I", "-S")
    assert set(heart) <= loaded
    assert {name.split(".")[0] for name in loaded} - sys.stdlib_module_names - {"foreword", "__main__"} == set()


def test_the_loop_runs_without_any_installed_package() -> None:
    engine = [dotted(path) for path in python_files("src") if room(path) == "engine"]
    loaded = modules_after(f"import {', '.join(engine)}", "-I", "-S")
    assert not HEAVY & loaded


def test_the_cache_pulls_in_cache_and_base_only() -> None:
    cache = [dotted(path) for path in python_files("src/foreword/cache")]
    loaded = modules_after(f"import {', '.join(cache)}", "-I", "-S")
    rooms = {name.split(".")[1] for name in loaded if name.startswith("foreword.")}
    assert rooms == {"base", "cache"}


def test_importing_foreword_loads_nothing_heavy() -> None:
    assert not HEAVY & modules_after("import foreword")


def test_every_module_can_be_imported_first() -> None:
    # No module relies on another having been imported before it; checked for the light rooms.
    light = [dotted(path) for path in python_files("src") if room(path) in {*HEART, "engine"}]
    for name in light:
        modules_after(f"import {name}", "-I", "-S")
