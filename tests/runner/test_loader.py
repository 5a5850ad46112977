import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foreword.base.config import CacheConfig, Config, DtypeName, ModelConfig
from foreword.base.errors import ConfigError, ModelRefused
from foreword.runner import loader
from foreword.runner.loader import load_runner, pick_device, pick_dtype
from foreword.runner.runner import ModelRunner
from tests.runner.models import CONFIGS, SIZES, build, t


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a directory."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    model: Any = build(CONFIGS["llama"](), torch.bfloat16)
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(folder)
    return folder


def run(model: Path | str, cache: Path, dtype: DtypeName = "auto", blocks: str = "8") -> ModelRunner:
    settings = ModelConfig(model=str(model), cache_dir=str(cache), dtype=dtype)
    runner = load_runner(Config(model=settings, cache=CacheConfig(kv_cache=blocks)))
    assert isinstance(runner, ModelRunner)
    return runner


def test_a_directory(saved: Path, tmp_path: Path) -> None:
    runner = run(saved, tmp_path, "float32")
    card = runner.card
    assert (card.name, card.directory, card.dtype, card.attention) == ("tiny-llama", str(saved), "float32", "llvm")
    assert (runner.num_blocks, runner.block_size, runner.block_bytes) == (8, 16, 16 * 3 * 2 * 2 * 16 * 4)
    assert (card.vocab_size, card.max_context) == (512, 512)
    assert card.end_ids == {2, 7}
    assert card.exact
    assert card.flops_per_token == 2 * 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64) + 2 * 64
    assert card.flops_per_token_and_key == 3 * 2 * 4 * 32


def test_kernels_are_kept_and_compiled_once_in_a_process(tmp_path: Path) -> None:
    model: Any = build(t.LlamaConfig(**{**SIZES, "head_dim": 224}), torch.bfloat16)  # as in no other test
    model.save_pretrained(tmp_path / "model")
    first, second = run(tmp_path / "model", tmp_path / "one"), run(tmp_path / "model", tmp_path / "two")
    assert first.card.attention == second.card.attention == "llvm"
    assert len(list((tmp_path / "one" / "kernels").iterdir())) >= 2  # attention, and putting away
    assert not (tmp_path / "two" / "kernels").exists()


def test_identity_does_not_go_by_name(saved: Path, tmp_path: Path) -> None:
    first = run(saved, tmp_path, "float32").ingredients
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for file in saved.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps({**config, "_name_or_path": "me", "transformers_version": "0"}))
    assert run(moved, tmp_path, "float32").ingredients == first
    assert run(saved, tmp_path, "bfloat16").ingredients != first
    (moved / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert run(moved, tmp_path, "float32").ingredients != first


@pytest.mark.parametrize("name", ["no/such-model", "no-such-model", "no/such/dir", "a b c"])
def test_a_model_that_is_not_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="is neither a directory here nor a hub model"):
        run(name, tmp_path)


@pytest.mark.parametrize("name", ["./not/here", "../nor/here", "/not/here", "~/not/here"])
def test_a_place_that_is_not_there_is_not_asked_of_the_hub(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=f"{name} is not there"):
        run(name, tmp_path)


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused):
        run(tmp_path, tmp_path)


def test_a_directory_without_weights(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    with pytest.raises(ModelRefused):
        run(tmp_path, tmp_path)


def test_code_in_a_checkpoint_is_never_run(saved: Path, tmp_path: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelRefused):
        run(tmp_path, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_refused_before_weights_are_read(tmp_path: Path) -> None:
    t.T5Config().save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="encoder-decoder"):
        run(tmp_path, tmp_path)


def test_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    def picked(wanted: DtypeName, saved: torch.dtype | None, device: str = "cpu") -> torch.dtype:
        config = ModelConfig(dtype=wanted)
        return pick_dtype(config, SimpleNamespace(dtype=saved), torch.device(device))

    assert picked("float32", torch.bfloat16) == torch.float32
    assert picked("bfloat16", torch.float32) == torch.bfloat16
    assert picked("auto", torch.float32) == torch.float32
    assert picked("auto", None) == torch.float32
    assert picked("auto", torch.float16) == torch.float32
    for able in (True, False):
        monkeypatch.setattr(loader, "_cpu_has_bfloat16", lambda able=able: able)
        assert picked("auto", torch.bfloat16) == (torch.bfloat16 if able else torch.float32)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    assert picked("auto", torch.bfloat16, "cuda") == torch.float16


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device(ModelConfig()) == torch.device("cpu")
    with pytest.raises(ConfigError, match="no card"):
        pick_device(ModelConfig(device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device(ModelConfig()) == torch.device("cuda")
    assert pick_device(ModelConfig(device="cpu")) == torch.device("cpu")


def test_no_room_for_a_block(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one block of this model needs"):
        run(saved, tmp_path, blocks="1KB")


def test_the_embedded_model_loads_quickly() -> None:
    """Converted before, it is there again in much less than it takes to convert."""
    load_runner(Config(cache=CacheConfig(kv_cache="8")))
    begin = time.thread_time()
    runner = load_runner(Config(cache=CacheConfig(kv_cache="8")))
    assert time.thread_time() - begin < 5
    assert (Path(runner.card.directory) / "tokenizer.json").exists()
    assert (Path(runner.card.directory) / "chat_template.jinja").exists()
