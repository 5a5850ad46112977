"""The plain runner by itself: whose state lies where, what it costs, and that nobody's answer depends on another's."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.base.config import CacheConfig, Config, ModelConfig, ScheduleConfig
from foreword.base.errors import ConfigError, InvariantBroken, ModelRefused
from foreword.base.ids import PENDING_TOKEN, BlockId, RequestId
from foreword.base.params import Sampling
from foreword.cache.orders import Compare, Copy
from foreword.runner import library, survey
from foreword.runner.loader import load_runner
from foreword.runner.plain import PlainRunner
from foreword.schedule.plan import Chunk, Draw, Plan
from tests.runner import models
from tests.runner.models import t
from tests.runner.plain_models import BORDER, CONFIGS, SIZES, answer, build, save

GREEDY = Sampling(max_tokens=1)


def load(folder: Path, kv_cache: str = "4", **schedule: Any) -> PlainRunner:
    runner = load_runner(
        Config(
            model=ModelConfig(model=str(folder), device="cpu", dtype="float32"),
            cache=CacheConfig(kv_cache=kv_cache),
            schedule=ScheduleConfig(**{"max_context": 256, **schedule}),
        )
    )
    assert isinstance(runner, PlainRunner)
    return runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3_next"), tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def runner(folder: Path) -> PlainRunner:
    return load(folder)


def prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(f"{length}/{seed}")
    return [source.randrange(5, 500) for _ in range(length)]


def chunk(name: str, block: int, tokens: list[int], start: int = 0) -> Chunk:
    return Chunk(RequestId(name), start, tuple(tokens), (BlockId(block),), Draw(GREEDY, 0))


def drawn(runner: PlainRunner, *chunks: Chunk) -> list[int]:
    samples = runner.launch(Plan(0, chunks)).land().samples
    return [samples[one.request].token for one in chunks]


def answers(runner: PlainRunner, prompts: dict[str, list[int]], count: int) -> dict[str, list[int]]:
    """All of them in every step, each in a block of its own."""
    found: dict[str, list[int]] = {name: [] for name in prompts}
    for step in range(count):
        chunks = [
            chunk(name, i, tokens) if step == 0 else chunk(name, i, found[name][-1:], len(tokens) + step - 1)
            for i, (name, tokens) in enumerate(prompts.items())
        ]
        for one, token in zip(chunks, drawn(runner, *chunks), strict=True):
            found[one.request].append(token)
    return found


def test_a_block_is_one_requests_whole_state(runner: PlainRunner) -> None:
    assert (runner.num_blocks, runner.block_size) == (4, 256)
    assert runner.block_bytes == runner.account.fixed_bytes + 256 * runner.account.token_bytes
    drawn(runner, chunk("a", 0, prompt(200)))
    size = runner.state_bytes(BlockId(0))
    assert size == runner.account.fixed_bytes + 200 * runner.account.token_bytes
    assert runner.account.token_bytes == 2 * 2 * 16 * 4, "one layer of four has keys and values"


def test_states_do_not_mix(runner: PlainRunner) -> None:
    model = build("qwen3_next")
    prompts = {"a": prompt(40), "b": prompt(3), "c": prompt(77), "d": prompt(1)}
    found = answers(runner, prompts, 6)
    assert found == {name: answer(model, tokens, 6) for name, tokens in prompts.items()}


def test_what_is_not_there_is_not_made_up(runner: PlainRunner) -> None:
    drawn(runner, chunk("a", 0, prompt(9)))
    wrong = (
        chunk("b", 0, [7], 9),
        chunk("a", 0, [7], 8),
        chunk("a", 0, [7], 10),
        chunk("a", 1, [7], 9),
    )
    for one in wrong:
        with pytest.raises(InvariantBroken, match="does not hold its first"):
            runner.launch(Plan(0, (one,))).land()
    with pytest.raises(InvariantBroken, match="was cut at 9"):
        runner.launch(Plan(0, (chunk("a", 0, [7, 8], 9),))).land()
    with pytest.raises(InvariantBroken, match="one block"):
        runner.launch(Plan(0, (Chunk(RequestId("a"), 0, (7,), (BlockId(0), BlockId(1)), None),))).land()
    undrawn = Chunk(RequestId("x"), 0, (7, 8), (BlockId(2),), None)
    assert runner.launch(Plan(0, (undrawn,))).land().samples == {}
    assert runner.depth == 1
    with pytest.raises(InvariantBroken, match="do not overlap"):
        runner.launch(Plan(0, (chunk("x", 2, [PENDING_TOKEN], 2),))).land()


def test_nothing_is_copied_or_compared(runner: PlainRunner) -> None:
    assert runner.compare(()) == ()
    with pytest.raises(InvariantBroken):
        runner.compare((Compare(BlockId(0), BlockId(1)),))
    with pytest.raises(InvariantBroken):
        runner.launch(Plan(0, (), (Copy(BlockId(0), BlockId(1), 1),))).land()


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "dynamic", "longrope"])
def test_who_has_to_begin_again_answers_the_same(family: str, tmp_path: Path) -> None:
    """To the bit: what was generated is computed in the same pieces as the first time."""
    runner = load(save(build(family), tmp_path))
    tokens = prompt(58)
    whole = answers(runner, {"a": tokens}, 20)["a"]
    state: Any = runner._states[BlockId(0)]
    bits = [tensor.clone() for tensor in library._tensors(state.cache, set())]
    found = answers(runner, {"b": tokens}, 10)["b"]
    assert found == whole[:10]
    drawn(runner, chunk("c", 0, prompt(30)))
    found += drawn(runner, chunk("b", 1, [*tokens, *found]))
    for step in range(9):
        found += drawn(runner, chunk("b", 1, found[-1:], 68 + step))
    assert found == whole
    state = runner._states[BlockId(1)]
    again = list(library._tensors(state.cache, set()))
    assert len(bits) == len(again)
    assert all(torch.equal(one, other) for one, other in zip(bits, again, strict=True))


def test_a_short_request_is_not_turned_by_a_long_one(tmp_path: Path) -> None:
    """Dynamic RoPE is held in the model's own modules; here each request has its own."""
    model = build("dynamic")
    runner = load(save(model, tmp_path))
    long, short = prompt(200), prompt(BORDER + 4)
    alone = answer(model, short, 12)
    answers(runner, {"long": long}, 2)
    assert answers(runner, {"short": short}, 12)["short"] == alone
    assert answers(runner, {"long": long, "short": short}, 12)["short"] == alone
    # The fault is real: the library's own model, used again, answers otherwise.
    ids = torch.tensor([long])
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0)
    assert answer(model, short, 12) != alone


def test_memory_is_divided_into_whole_requests(folder: Path) -> None:
    one = load(folder, max_context=256).account
    account = load(folder, kv_cache=f"{10 * one.block_bytes}B").account
    assert (account.num_blocks, account.context) == (10, 256)
    assert load(folder, kv_cache=f"{10 * one.block_bytes}B", max_running=3).num_blocks == 3
    shorter = load(folder, kv_cache=f"{10 * one.block_bytes}B", max_context=128).account
    assert shorter.num_blocks > 10
    tight = load(folder, kv_cache=f"{one.fixed_bytes + 100 * one.token_bytes}B").account
    assert (tight.num_blocks, tight.context) == (1, 100)
    with pytest.raises(ConfigError, match="one request of"):
        load(folder, kv_cache=f"{one.fixed_bytes}B")


def test_a_model_without_a_limit_gets_the_operators(tmp_path: Path) -> None:
    folder = save(build("mamba"), tmp_path)
    assert load(folder, max_context=100_000).card.max_context == 100_000
    runner = load(folder, max_context=None)
    assert runner.card.max_context == runner.block_size == 32768
    assert runner.account.token_bytes == 0


def test_a_layer_that_does_what_nobody_expects_makes_a_model_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found out only when the model is there: it is loaded again, with its own attention."""
    model = models.build(models.CONFIGS["llama"]())
    folder = save(model, tmp_path)
    note = survey._Listener.attend

    def complain(listener: Any, call: Any) -> Any:
        listener.complaints.append("layer 0 passes bias, unknown here")
        return note(listener, call)

    monkeypatch.setattr(survey._Listener, "attend", complain)
    runner = load(folder)
    assert runner.card.not_cacheable == "layer 0 passes bias, unknown here"
    assert "passes bias" in caplog.text
    tokens = prompt(30)
    assert answers(runner, {"a": tokens}, 8)["a"] == answer(model, tokens, 8)


@pytest.mark.parametrize(
    "config",
    [
        lambda: t.RecurrentGemmaConfig(
            **SIZES, attention_window_size=24, lru_width=64, block_types=["recurrent", "recurrent", "attention"]
        ),
        lambda: t.RwkvConfig(vocab_size=512, hidden_size=64, attention_hidden_size=64, num_hidden_layers=2),
    ],
    ids=["recurrent_gemma", "rwkv"],
)
def test_a_model_that_hands_no_state_on_is_refused(config: Any, tmp_path: Path) -> None:
    made = config()
    made.save_pretrained(tmp_path)
    models.t.AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match=r"gives no cache back|takes no cache"):
        load(tmp_path)


def test_a_model_whose_cache_forgets_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = library.forward_with_cache

    def forgetful(model: Any, ids: Any, positions: Any, cache: Any) -> Any:
        row, given = real(model, ids, positions, None if ids.shape[1] == 1 else cache)
        return row, given

    monkeypatch.setattr(library, "forward_with_cache", forgetful)
    with pytest.raises(ModelRefused, match="does not carry its whole state"):
        load(folder)


def test_reload(tmp_path: Path) -> None:
    first, second = build("lfm2"), build("lfm2")
    for parameter in second.parameters():
        parameter.data.mul_(1.1)
    runner = load(save(first, tmp_path))
    tokens, before = prompt(20), dict(runner.ingredients)
    assert answers(runner, {"a": tokens}, 6)["a"] == answer(first, tokens, 6)
    save(second, tmp_path)
    after = runner.reload()
    assert {key for key in before if before[key] != after[key]} == {"weights"}
    assert runner.ingredients == after
    assert answers(runner, {"b": tokens}, 6)["b"] == answer(second, tokens, 6)
    with pytest.raises(InvariantBroken):
        runner.launch(Plan(0, (chunk("a", 0, [7], 26),))).land()


def test_a_reload_that_fails_leaves_the_old_model(tmp_path: Path) -> None:
    model = build("lfm2")
    runner = load(save(model, tmp_path))
    tokens, before = prompt(20), dict(runner.ingredients)
    save(build("qwen3_next"), tmp_path)
    with pytest.raises(ConfigError, match="keeps another state"):
        runner.reload()
    save(models.build(models.CONFIGS["llama"]()), tmp_path)
    with pytest.raises(ConfigError, match="of another kind"):
        runner.reload()
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelRefused):
        runner.reload()
    assert runner.ingredients == before
    assert answers(runner, {"a": tokens}, 6)["a"] == answer(model, tokens, 6)


def test_every_family_is_here() -> None:
    assert {"mamba", "lfm2", "qwen3_next", "longrope", "dynamic"} <= set(CONFIGS)
