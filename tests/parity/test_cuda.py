"""On a card: the same answers as on the CPU and as the library gives there."""

import pytest
import torch

from foreword.base.config import CacheConfig, ModelConfig
from foreword.runner import library
from foreword.runner.attention.interface import attend
from foreword.runner.loader import Loaded, equip
from tests.parity.desk import Desk, random_cuts, random_tokens
from tests.parity.test_depth import Faulty, Run
from tests.runner.models import CONFIGS, build, own_logits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_chunks_on_a_card(family: str, dtype: torch.dtype) -> None:
    model = build(CONFIGS[family](), dtype)
    tokens = random_tokens(150, seed=3)
    theirs = own_logits(model, tokens).float()
    library.register_attention(attend)
    library.use_attention(model)
    loaded = Loaded(name="tiny", directory=None, model=model.cuda())
    runner = equip(loaded, ModelConfig(), CacheConfig(kv_cache="64"))
    assert runner.card.device == "cuda"
    assert not runner.card.exact
    for seed in range(2):
        desk = Desk(runner)
        ours = desk.whole(desk.open(tokens), random_cuts(150, seed)).float().cpu()
        gap = float((ours - theirs).square().sum().sqrt() / theirs.square().sum().sqrt())
        assert gap < (1e-3 if dtype == torch.float32 else 0.1)


def test_memory_is_sized_by_what_is_free() -> None:
    model = build(CONFIGS["llama"]()).cuda()
    library.register_attention(attend)
    library.use_attention(model)
    runner = equip(Loaded(name="tiny", directory=None, model=model), ModelConfig(), CacheConfig())
    free, total = torch.cuda.mem_get_info()
    assert runner.num_blocks * runner.block_bytes > 0.5 * total or free < 0.3 * total


def test_recorded_steps_answer_as_usual_ones() -> None:
    model = build(CONFIGS["llama"](), torch.bfloat16).cuda()
    library.register_attention(attend)
    library.use_attention(model)
    runner = equip(Loaded(name="tiny", directory=None, model=model), ModelConfig(), CacheConfig(kv_cache="64"))
    assert runner.card.attention == "triton"
    assert runner._graphs is not None
    prompts = [random_tokens(20 + i, seed=i) for i in range(5)]
    answers: list[list[list[int]]] = []
    for _ in range(2):
        desk = Desk(runner)
        answers.append(desk.answer([desk.open(prompt, room=8) for prompt in prompts], 6))
        runner.record(None)
    assert answers[0] == answers[1]


def test_two_steps_under_way_answer_as_one() -> None:
    model = build(CONFIGS["llama"]()).cuda()
    library.register_attention(attend)
    library.use_attention(model)
    runner = equip(Loaded(name="tiny", directory=None, model=model), ModelConfig(), CacheConfig(kv_cache="64"))
    assert runner.depth == 2
    one, two = (Run(Faulty(runner, depth), 64).go().samples for depth in (1, 2))
    for name, samples in one.items():
        assert [sample.token for sample in two[name]] == [sample.token for sample in samples]
