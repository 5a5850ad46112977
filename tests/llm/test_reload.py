"""Weights that change under a running server: what was computed with the old ones is never believed again."""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from foreword import LLM
from foreword.base.errors import Unavailable
from tests.text.embedded import embedded_directory

__all__ = ["embedded_directory"]

PROMPT = "Once upon a time there was a small model whose weights were drawn by chance, and nobody knew what it said."


def write(folder: Path, seed: int, *, layers: int = 2) -> None:
    """Put random weights where the model is read from, in one move."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.5,
    )
    fresh = folder / "fresh"
    transformers.LlamaForCausalLM(config).save_pretrained(fresh)
    for file in fresh.iterdir():
        file.replace(folder / file.name)


@pytest.fixture
def folder(tmp_path: Path, embedded_directory: Path) -> Path:
    for file in embedded_directory.iterdir():
        if file.name.startswith(("tokenizer", "special", "vocab", "merges", "chat")):
            shutil.copy(file, tmp_path / file.name)
    write(tmp_path, seed=1)
    return tmp_path


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), device="cpu", dtype="float32", kv_cache="64") as made:
        yield made


def ask(llm: LLM) -> tuple[tuple[int, ...], int]:
    result = llm.generate(PROMPT, max_tokens=8, ignore_eos=True)[0]
    return result.token_ids, result.cached_tokens


def test_wrong_reuse_changed_weights_are_another_model(llm: LLM, folder: Path) -> None:
    old, root = ask(llm)[0], llm.assembly.root
    assert ask(llm) == (old, 16)  # the owner hits, or the miss below proves nothing
    write(folder, seed=2)
    assert ask(llm)[0] == old  # nobody has asked for a reload yet
    assert llm.reload() == llm.assembly.root.hex() != root.hex()
    new, cached = ask(llm)
    assert cached == 0
    assert new != old
    with LLM(str(folder), device="cpu", dtype="float32", kv_cache="64") as cold:
        assert cold.assembly.root == llm.assembly.root
        assert ask(cold) == (new, 0)
    assert ask(llm) == (new, 16)
    write(folder, seed=1)
    assert llm.reload() == root.hex()
    assert ask(llm) == (old, 0)


def test_wrong_reuse_a_changed_rope_is_another_model(llm: LLM, folder: Path) -> None:
    old, root = ask(llm)[0], llm.assembly.root
    assert ask(llm) == (old, 16)
    file = folder / "config.json"
    before = file.read_text()
    settings = json.loads(before)
    settings["rope_parameters"] = {**settings["rope_parameters"], "rope_theta": 37.0}
    file.write_text(json.dumps(settings))
    assert llm.reload() != root.hex()
    new, cached = ask(llm)
    assert (cached, new != old) == (0, True)
    file.write_text(before)
    assert llm.reload() == root.hex()
    assert ask(llm)[0] == old


def test_the_same_weights_are_the_same_model(llm: LLM) -> None:
    answer, root = ask(llm)[0], llm.assembly.root
    assert llm.reload() == root.hex()
    assert ask(llm)[0] == answer


@pytest.mark.parametrize("how", ["torn", "missing", "other shape"])
def test_a_load_that_fails_leaves_the_old_model_serving(llm: LLM, folder: Path, how: str) -> None:
    answer, root = ask(llm)[0], llm.assembly.root
    weights = folder / "model.safetensors"
    if how == "torn":
        torn = folder / "torn"
        torn.write_bytes(weights.read_bytes()[:1000])
        torn.replace(weights)
    elif how == "missing":
        weights.unlink()
    else:
        write(folder, seed=2, layers=3)
    with pytest.raises(Exception, match=r".+"):
        llm.reload()
    assert llm.assembly.root == root
    assert ask(llm) == (answer, 16)
    llm.assembly.worker.check()


def test_requests_that_run_are_finished_first_and_others_are_told(llm: LLM, folder: Path) -> None:
    whole = llm.generate(PROMPT, max_tokens=300, ignore_eos=True)[0].token_ids
    llm.assembly.worker.flush()
    ids: list[tuple[int, ...]] = []
    running = threading.Thread(
        target=lambda: ids.append(llm.generate(PROMPT, max_tokens=300, ignore_eos=True)[0].token_ids)
    )
    running.start()
    while not llm.assembly.worker.state().running:
        pass
    write(folder, seed=2)
    reloading = threading.Thread(target=llm.reload)
    reloading.start()
    while llm.assembly.worker.ready:
        pass
    with pytest.raises(Unavailable, match="reloaded"):
        llm.generate("x", max_tokens=1)
    running.join()
    reloading.join()
    assert ids == [whole]
    assert ask(llm)[1] == 0
