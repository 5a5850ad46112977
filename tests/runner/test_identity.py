"""Everything that changes KV changes the root, one thing at a time; nothing that a name says plays a part.

Kinds of fault that users of other engines met: KV of one adapter reused for another of the same name, of one picture
for another of equal size, of a fine-tune for its base at the same path, of one precision for another.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.base.config import CacheConfig, Config, ModelConfig
from foreword.base.errors import ConfigError, ModelRefused
from foreword.base.ids import BlockHash, BlockId, RequestId
from foreword.cache import identity
from foreword.cache.identity import Chain, Space, root
from foreword.runner import fingerprint, library
from foreword.runner.fingerprint import adapter_digest, ingredients
from foreword.runner.loader import load_runner
from foreword.runner.plain import PlainRunner
from foreword.schedule.plan import Chunk, Plan
from tests.runner import plain_models
from tests.runner.models import CONFIGS, build
from tests.runner.plain_models import save

COMPUTING = {"dtype": "torch.float32", "kv_dtype": "torch.float32", "attention": "tiled 1"}
Rooted = Callable[..., tuple[BlockHash, Mapping[str, str]]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A window model with code of its own beside it, and an adapter."""
    made = tmp_path / "here" / "model"
    build(CONFIGS["mistral"]()).save_pretrained(made)  # pyright: ignore[reportCallIssue]
    (made / "modeling_mine.py").write_text("ANGLE = 1\n")
    adapter = tmp_path / "here" / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}))
    (adapter / "adapter_model.safetensors").write_bytes(b"A" * 64)
    return tmp_path / "here"


def rooted(folder: Path, *, block_size: int = 16, scaling: float = 2.0, **computing: str) -> Any:
    """The root of what lies in a folder, and its ingredients."""
    config = library.read_config(str(folder / "model"))
    with library.quiet():
        model: Any = build(CONFIGS["mistral"]())
    model.config = config
    memo = folder.parent / "memo.json"
    found = ingredients(model, folder / "model", memo, {**COMPUTING, **computing})
    found["adapter"] = adapter_digest(folder / "adapter", scaling, memo)
    return root(found, block_size), found


def edit(file: Path, **fields: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def flip(file: Path) -> None:
    """One bit, far behind the header."""
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(bytes(raw))


CHANGES: Mapping[str, tuple[str, Callable[[Path], object]]] = {
    "a bit of a weight": ("weights", lambda at: flip(at / "model" / "model.safetensors")),
    "one more file of weights": ("weights", lambda at: (at / "model" / "b.safetensors").write_bytes(b"x")),
    "which file a weight is taken from": (
        "weights",
        lambda at: (at / "model" / "model.safetensors.index.json").write_text("{}"),
    ),
    "rope": (
        "config",
        lambda at: edit(at / "model" / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    ),
    "the kind of rope": (
        "config",
        lambda at: edit(
            at / "model" / "config.json", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
        ),
    ),
    "window": ("config", lambda at: edit(at / "model" / "config.json", sliding_window=25)),
    "a norm's epsilon": ("config", lambda at: edit(at / "model" / "config.json", rms_norm_eps=1e-3)),
    "quantisation": (
        "quantisation",
        lambda at: edit(
            at / "model" / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}
        ),
    ),
    "how fine it is quantised": (
        "quantisation",
        lambda at: edit(
            at / "model" / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}
        ),
    ),
    "code beside the weights": ("code", lambda at: (at / "model" / "modeling_mine.py").write_text("ANGLE = 2\n")),
    "one more file of code": ("code", lambda at: (at / "model" / "more.py").write_text("")),
    "an adapter's weights": ("adapter", lambda at: flip(at / "adapter" / "adapter_model.safetensors")),
    "an adapter's configuration": ("adapter", lambda at: edit(at / "adapter" / "adapter_config.json", lora_alpha=32)),
}


def test_wrong_reuse_every_ingredient_changes_the_root_by_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, before = rooted(folder)
    assert rooted(folder) == (base, before)
    roots = {base}

    def differs(name: str, found: tuple[BlockHash, Mapping[str, str]]) -> None:
        changed = {key for key in before if found[1][key] != before[key]}
        assert name in changed
        assert changed <= {name, "config"}, "quantisation is a part of the configuration as well"
        roots.add(found[0])

    for name, change in CHANGES.values():
        copy = shutil.copytree(folder, folder.parent / f"copy{len(roots)}")
        change(copy)
        differs(name, rooted(copy))
    differs("adapter", rooted(folder, scaling=1.0))
    differs("dtype", rooted(folder, dtype="torch.bfloat16"))
    differs("kv_dtype", rooted(folder, kv_dtype="torch.float8_e4m3fn"))
    differs("attention", rooted(folder, attention="another kernel"))
    for place, name, value in (
        (library, "VERSION", "5.99"),
        (fingerprint, "_FORMAT", "2"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, value)
            differs("library" if place is library else "format", rooted(folder))
    torch.set_num_threads(2)
    differs("arithmetic", rooted(folder))
    torch.set_num_threads(1)
    roots.add(rooted(folder, block_size=32)[0])
    with monkeypatch.context() as patched:
        patched.setattr(identity, "_FORMAT", b"foreword kv 2")
        roots.add(rooted(folder)[0])
    assert len(roots) == 1 + len(CHANGES) + 9
    assert rooted(folder) == (base, before)


def test_what_changes_no_kv_changes_no_root(folder: Path) -> None:
    base, _ = rooted(folder)
    moved = folder.rename(folder.parent / "there")
    (moved / "model").rename(moved / "model.old")
    shutil.copytree(moved / "model.old", moved / "model")
    (moved / "model" / "model.safetensors").rename(moved / "model" / "weights.safetensors")
    edit(moved / "model" / "config.json", _name_or_path="me/mine", transformers_version="4", use_cache=False)
    edit(moved / "adapter" / "adapter_config.json", base_model_name_or_path="base", inference_mode=True)
    (moved / "model" / "tokenizer_config.json").write_text("{}")
    (moved / "model" / "generation_config.json").write_text('{"temperature": 0.1}')
    assert rooted(moved)[0] == base


def test_a_model_in_memory_goes_by_its_bytes() -> None:
    model = build(CONFIGS["llama"]())
    before = ingredients(model, None, Path("nowhere"), COMPUTING)
    with torch.no_grad():
        weight = next(model.parameters())
        weight.view(-1)[7] += 1e-6
    after = ingredients(model, None, Path("nowhere"), COMPUTING)
    assert {key for key in before if before[key] != after[key]} == {"weights"}
    with torch.no_grad():
        weight.view(-1)[7] -= 1e-6
    assert set(before) == set(after)


@pytest.fixture
def run(tmp_path: Path) -> Rooted:
    """Root and ingredients of a directory as the whole way to a running model finds them."""

    def at(place: Path, **settings: Any) -> tuple[BlockHash, Mapping[str, str]]:
        chosen = ModelConfig(model=str(place), device="cpu", cache_dir=str(tmp_path / "memo"), **settings)
        runner = load_runner(Config(model=chosen, cache=CacheConfig(kv_cache="8")))
        return root(runner.ingredients, runner.block_size), runner.ingredients

    return at


def test_wrong_reuse_another_model_of_equal_shape_at_one_path(run: Rooted, tmp_path: Path) -> None:
    """Base and fine-tune take turns in one folder, as after a download under the same name."""
    place = tmp_path / "model"
    roots: list[BlockHash] = []
    for seed in (0, 1, 0):
        shutil.rmtree(place, ignore_errors=True)
        save(build(CONFIGS["llama"](), seed=seed), place)
        roots.append(run(place)[0])
    assert roots[0] == roots[2] != roots[1]


def test_quantised_kv_another_precision(run: Rooted, tmp_path: Path) -> None:
    save(build(CONFIGS["llama"]()), tmp_path / "model")
    one, two = run(tmp_path / "model", dtype="float32"), run(tmp_path / "model", dtype="bfloat16")
    assert one[0] != two[0]
    assert {"dtype", "kv_dtype"} <= {key for key in one[1] if one[1][key] != two[1][key]}


def test_lora_an_adapter_beside_the_weights_is_not_silently_left_out(run: Rooted, tmp_path: Path) -> None:
    save(build(CONFIGS["llama"]()), tmp_path / "model")
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelRefused, match="merge it"):
        run(tmp_path / "model")


def test_weights_that_change_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = save(build(CONFIGS["llama"]()), tmp_path / "model")
    real = library.load_weights

    def meanwhile(*arguments: Any) -> Any:
        loaded = real(*arguments)
        flip(place / "model.safetensors")
        return loaded

    monkeypatch.setattr(library, "load_weights", meanwhile)
    with pytest.raises(ModelRefused, match="written to while they were read"):
        load_runner(Config(model=ModelConfig(model=str(place)), cache=CacheConfig(kv_cache="8")))


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_a_reload_of_a_model_with_another_context_is_refused(tmp_path: Path, family: str) -> None:
    """Requests are let in by the context of the model before, so a shorter one would be read past its end."""
    model = build(CONFIGS["llama"]()) if family == "llama" else plain_models.build(family)
    place = save(model, tmp_path / "model")
    runner = load_runner(Config(model=ModelConfig(model=str(place)), cache=CacheConfig(kv_cache="64MiB")))
    card, ingredients = runner.card, dict(runner.ingredients)
    assert runner.reload() == ingredients
    edit(place / "config.json", max_position_embeddings=card.max_context // 2)
    with pytest.raises(ConfigError, match=f"a context of {card.max_context // 2} tokens, not of {card.max_context}"):
        runner.reload()
    assert runner.card == card


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3", "mamba", "minimax"])
def test_a_running_model_reads_no_file(tmp_path: Path, family: str, dtype: str) -> None:
    """Whoever multiplies by the weights, whatever else there is beside them, and whether or not prefixes are reused."""
    model = build(CONFIGS[family]()) if family in CONFIGS else plain_models.build(family)
    model = model.to(getattr(torch, dtype))
    for name, buffer in model.named_buffers():
        if "correction" in name:  # which expert is asked: float32 in all checkpoints
            buffer.data = torch.randn(buffer.shape)
    place = save(model, tmp_path / "model")
    setting = ModelConfig(model=str(place), dtype=dtype)  # pyright: ignore[reportArgumentType]
    runner = load_runner(Config(model=setting, cache=CacheConfig(kv_cache="8")))

    def logits() -> torch.Tensor:
        if isinstance(runner, PlainRunner):
            return torch.stack(list(runner.logits((1, 2, 3, 4), prompt=3)))
        return runner.logits(Plan(0, (Chunk(RequestId("one"), 0, (1, 2, 3, 4), (BlockId(0),), None),)))

    before = logits().clone()
    for file in place.glob("*.safetensors"):
        with file.open("r+b") as opened:
            opened.write(b"\x3c" * file.stat().st_size)
    assert torch.equal(logits(), before)
    assert torch.isfinite(before).all()
    for file in place.glob("*.safetensors"):
        os.truncate(file, 0)  # as the first thing that copying over it does; reading it would end the process now
    assert torch.equal(logits(), before)


def test_a_file_that_was_written_to_and_dated_back_is_hashed_again(tmp_path: Path) -> None:
    file, memo = tmp_path / "a.safetensors", tmp_path / "memo.json"
    file.write_bytes(b"one")
    long_ago = time.time_ns() - 10**12
    os.utime(file, ns=(long_ago, long_ago))
    time.sleep(fingerprint._SETTLED_NS / 1e9 + 0.1)
    first = fingerprint.weights_digest(tmp_path, memo)
    assert memo.exists(), "it had settled, so it is remembered"
    with file.open("r+b") as opened:
        opened.write(b"two")
    os.utime(file, ns=(long_ago, long_ago))
    assert fingerprint.weights_digest(tmp_path, memo) != first


def test_a_file_written_to_in_one_tick_of_the_clock_is_hashed_again(tmp_path: Path) -> None:
    """Two writes may leave size, time and inode as they are; what is that fresh is not remembered."""
    file, memo = tmp_path / "a.safetensors", tmp_path / "memo.json"
    file.write_bytes(b"one")
    first = fingerprint.weights_digest(tmp_path, memo)
    status = file.stat()
    with file.open("r+b") as opened:
        opened.write(b"two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns, file.stat().st_ino) == (
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
    )
    assert fingerprint.weights_digest(tmp_path, memo) != first


def picture(raw: bytes, width: int, height: int, background: str) -> bytes:
    """What a picture would add to the block that its placeholder lies in: its pixels and all that shapes them."""
    settings = json.dumps({"width": width, "height": height, "background": background}, sort_keys=True).encode()
    return sha256(len(settings).to_bytes(4, "little") + settings + raw).digest()


def test_multimodal_another_picture_behind_the_same_placeholders(folder: Path) -> None:
    """Nothing takes pictures yet; a chain that carries them has them in its hashes from their block on."""
    tokens, space = [7] * 64, Space(rooted(folder)[0], 16)
    pictures = {
        picture(raw, width, height, background)
        for raw in (b"\0" * 4500, b"\1" * 4500)
        for width, height in ((30, 150), (150, 30))
        for background in ("white", "black")
    }
    assert len(pictures) == 8
    chains = [Chain(space, tokens, extras={1: (one,)}) for one in pictures]
    plain = Chain(space, tokens)
    assert {chain.hashes[0] for chain in chains} == {plain.hashes[0]}
    for block in (1, 2, 3):
        assert len({plain.hashes[block], *(chain.hashes[block] for chain in chains)}) == 9
