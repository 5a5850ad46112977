"""What an operator does: heads that all tenants share, and a reload that fails or not."""

from dataclasses import replace
from pathlib import Path

import pytest

from foreword.base.errors import NotFound, RequestError
from foreword.base.ids import BlockHash
from foreword.cache.identity import Chain, Space, Tenant
from foreword.front.ask import Ask, Caller, Conversation
from foreword.front.front import Front, Served
from foreword.front.keeper import Keeper
from foreword.front.operator import Operator, head_ids
from foreword.text.recall import Recall
from foreword.text.tokenizer import Tokenizer
from tests.front.played import PlayedEngine

RED, BLUE = Tenant.named("red"), Tenant.named("blue")
HEAD = "You are the night porter of the Grand Hotel at the lake. You are kind, brief and exact."
SYSTEM = Conversation(({"role": "system", "content": HEAD},))


@pytest.fixture
def operator(front: Front, engine: PlayedEngine) -> Operator:
    return Operator(front, engine, lambda: front.served, max_public_blocks=8)


def chain(front: Front, engine: PlayedEngine, prompt: str | Conversation, tenant: Tenant) -> Chain:
    front.submit(Ask(prompt=prompt, max_tokens=1), Caller(tenant=tenant))
    return engine.submissions[-1].chain


def shared(one: Chain, other: Chain) -> int:
    return sum(left == right for left, right in zip(one.hashes, other.hashes, strict=False))


def test_tenants_share_the_full_blocks_of_a_head_and_nothing_else(
    front: Front, engine: PlayedEngine, operator: Operator
) -> None:
    before = [chain(front, engine, f"{HEAD} Question", tenant) for tenant in (RED, BLUE)]
    assert shared(*before) == 0
    marked = operator.mark(HEAD)
    assert (marked.num_tokens, marked.num_blocks) == (len(front.tokenizer.encode(HEAD)), marked.num_tokens // 4)
    assert operator.num_public_blocks == marked.num_blocks == len(engine.shared[-1])
    red, blue = (chain(front, engine, f"{HEAD} The same long question of both", tenant) for tenant in (RED, BLUE))
    assert shared(red, blue) == red.first_private == marked.num_blocks
    assert len(red.hashes) > marked.num_blocks
    assert operator.mark(HEAD) == marked
    assert operator.heads == (marked,)
    operator.unmark(HEAD)
    assert engine.shared[-1] == frozenset()
    assert shared(*(chain(front, engine, f"{HEAD} Question", tenant) for tenant in (RED, BLUE))) == 0


def test_the_head_of_messages_is_what_every_conversation_begins_with(
    front: Front, engine: PlayedEngine, operator: Operator
) -> None:
    ids = head_ids(SYSTEM, front.served)
    for question in ("a", "Another", "0", "…", "<|im_end|>"):
        whole = front.render_chat([*SYSTEM.messages, {"role": "user", "content": question}])
        assert whole[: len(ids)] == ids
    text = front.tokenizer.decode(ids)
    assert HEAD in text
    marked = operator.mark(SYSTEM)
    conversations = [
        Conversation((*SYSTEM.messages, {"role": "user", "content": f"When is {what}?"})) for what in ("it", "tea")
    ]
    red, blue = chain(front, engine, conversations[0], RED), chain(front, engine, conversations[1], BLUE)
    assert shared(red, blue) == marked.num_blocks == len(ids) // 4


@pytest.mark.parametrize(
    ("user", "shown"), [("someone", False), ("{{ message.content | length }}", False), ("{{ message.content }}", True)]
)
def test_a_template_that_does_not_show_where_a_user_begins(
    front: Front, embedded_directory: Path, tmp_path: Path, user: str, shown: bool
) -> None:
    for file in embedded_directory.glob("*token*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    says = "{% if message.role == 'user' %}" + user + "{% else %}{{ message.content }}{% endif %}|"
    (tmp_path / "chat_template.jinja").write_text("{% for message in messages %}" + says + "{% endfor %}")
    served = replace(front.served, tokenizer=Tokenizer(tmp_path))
    front.served = served
    keeper = Keeper(front, PlayedEngine())
    if shown:
        assert front.tokenizer.decode(head_ids(SYSTEM, served)) == f"{HEAD}|"
        assert keeper.flush(SYSTEM).dropped == 0
        return
    for ask in (lambda: head_ids(SYSTEM, served), lambda: keeper.flush(SYSTEM), lambda: keeper.pin(SYSTEM)):
        with pytest.raises(RequestError, match="does not show where a user's next words begin") as refused:
            ask()
        assert refused.value.field == "messages"


def test_heads_may_overlap_and_one_can_go(front: Front, engine: PlayedEngine, operator: Operator) -> None:
    short = HEAD[:50]
    few, many = operator.mark(short).num_blocks, operator.mark(HEAD).num_blocks
    assert operator.num_public_blocks <= few + many - 2
    operator.unmark(HEAD)
    red, blue = (chain(front, engine, f"{HEAD} Question", tenant) for tenant in (RED, BLUE))
    assert shared(red, blue) >= few - 1 > 0
    with pytest.raises(NotFound, match="not public"):
        operator.unmark(HEAD)


def test_what_cannot_be_a_head(operator: Operator) -> None:
    with pytest.raises(RequestError, match="less than a block of 4") as short:
        operator.mark("Hi")
    assert short.value.field == "prompt"
    with pytest.raises(RequestError, match="8 are allowed, a quarter of the pool") as long:
        operator.mark(Conversation(({"role": "system", "content": HEAD * 3},)))
    assert long.value.field == "messages"
    assert operator.heads == ()


def test_a_reload_moves_heads_to_the_new_root(front: Front, engine: PlayedEngine, operator: Operator) -> None:
    other = BlockHash(bytes([7] * 32))
    operator._load = lambda: replace(front.served, space=Space(other, 4))
    operator.mark(HEAD)
    old = chain(front, engine, HEAD, RED)
    assert operator.reload() == other
    new, blue = chain(front, engine, HEAD, RED), chain(front, engine, HEAD, BLUE)
    assert new.root == other
    assert shared(old, new) == 0
    assert shared(new, blue) == operator.num_public_blocks > 0


def test_a_flush_and_a_reload_forget_what_was_said(front: Front, engine: PlayedEngine, operator: Operator) -> None:
    engine.tokens = [token for letter in "Hi you" for token in front.tokenizer.encode(letter)]
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "Hi you"})
    echo = Ask(prompt=Conversation((*messages, {"role": "user", "content": "!"})), max_tokens=1)
    keeper, red = Keeper(front, engine), Caller(tenant=RED)
    operator._load = lambda: replace(front.served, recall=Recall(front.tokenizer))
    for forget, left in (
        (lambda: None, 6),
        (lambda: keeper.flush(tenant=BLUE), 6),
        (lambda: keeper.flush(tenant=RED), 0),
        (keeper.flush, 0),
        (operator.reload, 0),
    ):
        list(front.submit(Ask(prompt=Conversation(messages[:1])), red))
        forget()
        front.submit(echo, red)
        assert engine.submissions[-1].recalled_tokens == left


def test_a_load_that_fails_changes_nothing(front: Front, engine: PlayedEngine, operator: Operator) -> None:
    def fail() -> Served:
        raise OSError("no such file")

    operator._load = fail
    operator.mark(HEAD)
    served, told = front.served, len(engine.shared)
    with pytest.raises(OSError, match="no such file"):
        operator.reload()
    assert front.served is served
    assert len(engine.shared) == told


def test_a_head_that_the_new_model_cannot_read_is_dropped(
    front: Front, engine: PlayedEngine, operator: Operator, caplog: pytest.LogCaptureFixture
) -> None:
    operator.mark(HEAD)
    narrow = replace(front.served.bounds, vocab_size=10)
    operator._heads.append(Conversation(({"role": "system", "content": "a b " * 2_000_000},)))
    operator._load = lambda: replace(front.served, bounds=narrow)
    operator.reload()
    assert [public.head for public in operator.heads] == [HEAD]
    assert "public no longer" in caplog.text


def test_what_is_public_needs_no_pin(front: Front, engine: PlayedEngine, operator: Operator) -> None:
    keeper, ids = Keeper(front, engine), front.tokenizer.encode(HEAD)
    operator.mark(HEAD)
    block = max(front.served.space.public)
    for prefix in (HEAD, tuple(ids), block):
        for verb in (keeper.pin, keeper.unpin, keeper.flush):
            with pytest.raises(RequestError, match=r"public: .*it needs no pin"):
                verb(prefix, RED)
    with pytest.raises(RequestError, match="has 1 token; it must fill a block of 4"):
        keeper.pin((1,), RED)
