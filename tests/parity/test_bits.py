"""A row's bits depend on its own tokens and positions only: not on chunks, hits, decode or prefill, or batch-mates."""

import random
from collections.abc import Sequence

import pytest
import torch

from foreword.runner.runner import ModelRunner
from tests.parity.desk import Desk, Line, random_tokens
from tests.runner.models import CONFIGS, build, runner_around, t

CUTS: tuple[tuple[int, ...], ...] = (
    (128, 77),
    (64, 64, 64, 13),
    (203, 2),
    (197, 8),
    (188, *(1,) * 8, 9),
    (37, 37, 37, 37, 37, 20),
    (64, 1, 1, 1, 100, 16, 22),
    (1, 1, 1, 1, 201),
    (192, 1, 12),
)
LENGTH = 205
MATES = (1, 5, 19)


def rows_in_company(desk: Desk, line: Line, cuts: Sequence[int], seed: int) -> torch.Tensor:
    """All rows of a line, each step next to a decode, a short chunk and a long one, in random order."""
    source = random.Random(seed)
    mates = [desk.open(random_tokens(len(cuts) * step, seed=seed + step)) for step in MATES]
    rows: list[torch.Tensor] = []
    for count in cuts:
        parts = [(line, count), *((mate, step) for mate, step in zip(mates, MATES, strict=True))]
        source.shuffle(parts)
        found = desk.logits(parts)
        rows.append(found[[owner for owner, _ in parts].index(line)])
    for mate in mates:
        desk.close(mate)
    return torch.cat(rows)


def stored(runner: ModelRunner, line: Line) -> torch.Tensor:
    """Keys and values of a line's tokens, all layers end to end; what its last block holds behind them is nobody's."""
    memory, blocks = runner.memory, torch.tensor(line.table)
    pieces = (part(layer)[blocks] for layer in range(memory.layout.num_layers) for part in (memory.keys, memory.values))
    return torch.cat([piece.flatten(0, 1)[: line.done].reshape(-1) for piece in pieces])


def hold(runner: ModelRunner, cuts: Sequence[Sequence[int]], length: int = LENGTH) -> None:
    tokens = random_tokens(length, seed=1, vocabulary=runner.card.vocab_size)
    desk = Desk(runner)
    line = desk.open(tokens)
    logits, state = desk.whole(line, [length]), stored(runner, line)
    for seed, sizes in enumerate(cuts):
        alone, company = desk.open(tokens), desk.open(tokens)
        assert torch.equal(desk.whole(alone, sizes), logits), f"chunks {sizes}"
        assert torch.equal(stored(runner, alone), state), f"KV of chunks {sizes}"
        assert torch.equal(rows_in_company(desk, company, sizes, seed), logits), f"chunks {sizes} in company"
        assert torch.equal(stored(runner, company), state), f"KV of chunks {sizes} in company"
        desk.close(alone)
        desk.close(company)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3"])
def test_tiny(family: str, dtype: torch.dtype) -> None:
    runner = runner_around(build(CONFIGS[family](), dtype), blocks=128)
    assert runner.card.exact
    hold(runner, CUTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (7, 1)])
def test_other_widths(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """One layer of sizes that matrix libraries block differently, with and without grouped heads."""
    config = t.Qwen2Config(
        vocab_size=1000,
        hidden_size=896,
        intermediate_size=2432,
        num_hidden_layers=2,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=128,
        max_position_embeddings=512,
    )
    hold(runner_around(build(config, dtype), blocks=128), CUTS[::2])


def test_embedded_in_bfloat16(embedded_bf16: ModelRunner) -> None:
    hold(embedded_bf16, CUTS[::2])


def test_embedded_in_float32(embedded_fp32: ModelRunner) -> None:
    hold(embedded_fp32, CUTS[4:6])


def test_long_rows(embedded_bf16: ModelRunner) -> None:
    """Past 512 keys, where kernels start to work in pieces."""
    hold(embedded_bf16, ((512, 148), (640, 20)), length=660)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_two_threads(dtype: torch.dtype) -> None:
    """As wide as the embedded model, in two layers: threads cut products by their width."""
    config = t.LlamaConfig(
        vocab_size=4096,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=1024,
    )
    hold(runner_around(build(config, dtype), blocks=128), CUTS)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("foreign", [float("nan"), float("inf"), 1e30])
def test_what_others_left_is_never_read(family: str, foreign: float) -> None:
    """Freed blocks may hold anything, and padding reads only the null block."""
    runner = runner_around(build(CONFIGS[family]()), blocks=32)
    tokens = random_tokens(83, seed=2)
    runner.memory.buffer[:-1] = 0
    clean = Desk(runner).whole(Desk(runner).open(tokens), [83])
    runner.memory.buffer[:-1] = foreign
    for cuts in ([83], [50, 33], [33, *[1] * 20, 30]):
        runner.memory.buffer[:-1] = foreign
        desk = Desk(runner)
        assert torch.equal(desk.whole(desk.open(tokens), cuts), clean)
    assert not runner.memory.buffer[-1].any()
