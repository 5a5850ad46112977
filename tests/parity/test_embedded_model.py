"""The embedded model on real text: cached, chunked and batched it answers as the library's `generate` does."""

import pytest
import torch
from tokenizers import Tokenizer
from torch import nn

from foreword.runner.runner import ModelRunner
from tests.parity.desk import Desk
from tests.runner.models import own_answer, own_logits

SYSTEM = (
    "You are the assistant of a small public library. The library opens at nine and closes at six, and on Saturdays it"
    " closes at one. Books may be kept for four weeks and extended twice. Answer briefly and only about the library."
)
QUESTIONS = ("When do you close on Saturdays?", "How long may I keep a book?", "What is the capital of France?")
SIZE = 16


def prompt(runner: ModelRunner, question: str) -> list[int]:
    text = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return Tokenizer.from_file(f"{runner.card.directory}/tokenizer.json").encode(text, add_special_tokens=False).ids


def shared_blocks(one: list[int], other: list[int]) -> int:
    same = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return same // SIZE


def test_what_is_known_of_it(embedded_fp32: ModelRunner) -> None:
    card = embedded_fp32.card
    assert card.name == "SmolLM2-135M-Instruct"
    assert (card.vocab_size, card.max_context, card.end_ids) == (49152, 8192, frozenset({2}))
    assert embedded_fp32.block_bytes == 16 * 46080
    assert card.num_parameters == 134_515_008
    assert card.exact


def test_cached_is_uncached_is_generate(embedded_fp32: ModelRunner, library_fp32: nn.Module) -> None:
    desk = Desk(embedded_fp32)
    prompts = [prompt(embedded_fp32, question) for question in QUESTIONS]
    first = desk.open(prompts[0], room=16)
    [answer] = desk.answer([first], 16)
    answers = [answer]
    for tokens in prompts[1:]:
        reuse = shared_blocks(prompts[0], tokens)
        assert reuse >= 3
        [warm] = desk.answer([desk.open(tokens, like=first, reuse=reuse, room=16)], 16)
        [cold] = desk.answer([desk.open(tokens, room=16)], 16)
        assert warm == cold
        answers.append(warm)
    for tokens, found in zip(prompts, answers, strict=True):
        theirs = own_answer(library_fp32, tokens, 16)
        assert found[: len(theirs)] == theirs


def test_batched_is_alone(embedded_fp32: ModelRunner) -> None:
    prompts = [prompt(embedded_fp32, question) for question in QUESTIONS]
    desk = Desk(embedded_fp32)
    together = desk.answer([desk.open(tokens, room=8) for tokens in prompts], 8)
    alone = [desk.answer([desk.open(tokens, room=8)], 8)[0] for tokens in prompts]
    assert together == alone


def test_logits_in_float32(embedded_fp32: ModelRunner, library_fp32: nn.Module) -> None:
    tokens = prompt(embedded_fp32, QUESTIONS[0])
    desk = Desk(embedded_fp32)
    ours = desk.whole(desk.open(tokens), [50, 1, len(tokens) - 51])
    theirs = own_logits(library_fp32, tokens)
    assert float((ours - theirs).abs().max()) < 5e-4
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_logits_in_bfloat16(embedded_bf16: ModelRunner, library_bf16: nn.Module) -> None:
    """Half precision rounds; the gap is compared with the library's own between two of its attention functions."""
    tokens = prompt(embedded_bf16, QUESTIONS[0])
    desk = Desk(embedded_bf16)
    ours = desk.whole(desk.open(tokens), [50, 1, len(tokens) - 51]).float()
    theirs = own_logits(library_bf16, tokens).float()
    assert float((ours - theirs).square().sum().sqrt() / theirs.square().sum().sqrt()) < 0.03
    assert float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()) > 0.9


@pytest.mark.parametrize("question", QUESTIONS)
def test_bfloat16_cached_is_uncached(embedded_bf16: ModelRunner, question: str) -> None:
    desk = Desk(embedded_bf16)
    donor = desk.open(prompt(embedded_bf16, "Who wrote Emma?"))
    desk.whole(donor, [len(donor.tokens)])
    tokens = prompt(embedded_bf16, question)
    warm = desk.open(tokens, like=donor, reuse=shared_blocks(donor.tokens, tokens), room=12)
    assert desk.answer([warm], 12) == desk.answer([desk.open(tokens, room=12)], 12)
