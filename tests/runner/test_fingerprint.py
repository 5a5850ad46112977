import os
from pathlib import Path

import pytest
import torch

from foreword.runner import fingerprint
from foreword.runner.fingerprint import config_digest, ingredients, state_digest, weights_digest
from tests.runner.models import CONFIGS, build

LONG_AGO_NS = 10**18


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that have lain there for long."""
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", -(10**9))
    made = tmp_path / "model"
    made.mkdir()
    (made / "a.safetensors").write_bytes(b"one" * 1000)
    (made / "b.safetensors").write_bytes(b"two" * 1000)
    (made / "config.json").write_text("{}")
    for file in made.iterdir():
        os.utime(file, ns=(LONG_AGO_NS, LONG_AGO_NS))
    return made


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read to be hashed."""
    seen: list[str] = []
    real = fingerprint._hash_file

    def count(file: Path) -> str:
        seen.append(file.name)
        return real(file)

    monkeypatch.setattr(fingerprint, "_hash_file", count)
    return seen


def test_files_are_read_once(folder: Path, tmp_path: Path, hashed: list[str]) -> None:
    memo = tmp_path / "cache" / "digests.json"
    first = weights_digest(folder, memo)
    assert hashed == ["a.safetensors", "b.safetensors"]
    assert weights_digest(folder, memo) == first
    assert len(hashed) == 2
    assert [file.name for file in memo.parent.iterdir()] == ["digests.json"]


def test_other_bytes_of_the_same_size(folder: Path, tmp_path: Path) -> None:
    memo = tmp_path / "digests.json"
    first = weights_digest(folder, memo)
    file = folder / "a.safetensors"
    file.write_bytes(b"eno" * 1000)
    os.utime(file, ns=(LONG_AGO_NS, LONG_AGO_NS + 1))
    assert weights_digest(folder, memo) != first


def test_a_name_plays_no_part(folder: Path, tmp_path: Path) -> None:
    memo = tmp_path / "digests.json"
    first = weights_digest(folder, memo)
    (folder / "a.safetensors").rename(folder / "z.safetensors")
    assert weights_digest(folder.rename(tmp_path / "another"), memo) == first


@pytest.mark.parametrize("torn", ["", "{", "[1]", '{"a": 1}', "\0"])
def test_a_torn_memo_is_ignored(folder: Path, tmp_path: Path, torn: str) -> None:
    memo = tmp_path / "digests.json"
    first = weights_digest(folder, memo)
    memo.write_text(torn)
    assert weights_digest(folder, memo) == first


def test_a_memo_that_cannot_be_written(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert weights_digest(folder, tmp_path / "file" / "digests.json")
    assert "not remembered" in caplog.text


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        weights_digest(tmp_path, tmp_path / "digests.json")


def test_one_changed_number_changes_the_state() -> None:
    model, twin = build(CONFIGS["llama"]()), build(CONFIGS["llama"]())
    assert state_digest(model) == state_digest(twin)
    with torch.no_grad():
        next(twin.parameters()).view(-1)[17] += 1e-6
    assert state_digest(model) != state_digest(twin)
    assert state_digest(model) != state_digest(model.bfloat16())


def test_noise_in_a_configuration() -> None:
    config = {"hidden_size": 64, "rope_parameters": {"rope_theta": 1e4}, "_name_or_path": "a", "dtype": "float32"}
    assert config_digest(config) == config_digest({**config, "_name_or_path": "b", "transformers_version": "9"})
    assert config_digest(config) != config_digest({**config, "hidden_size": 65})
    assert config_digest(config) != config_digest({**config, "rope_parameters": {"rope_theta": 1e5}})


def test_what_changes_kv_changes_an_ingredient(tmp_path: Path) -> None:
    def made(
        family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **computing: str
    ) -> dict[str, str]:
        return ingredients(build(CONFIGS[family](), dtype, seed), None, tmp_path / "memo", computing)

    base = made()
    assert base == made()
    assert made(seed=1)["weights"] != base["weights"]
    assert made("qwen2")["config"] != base["config"]
    assert made(dtype=torch.bfloat16)["weights"] != base["weights"]
    assert made(kv_dtype="float8")["kv_dtype"] == "float8"
    assert all(isinstance(value, str) for value in base.values())
    assert str(tmp_path) not in "".join(base.values())


def test_threads_are_told() -> None:
    weight = torch.zeros(1)
    assert fingerprint.arithmetic(weight) == fingerprint.arithmetic(weight)
    assert "1 threads" in fingerprint.arithmetic(weight)
    assert fingerprint.arithmetic(weight) != fingerprint.arithmetic(weight.bfloat16())
