"""PrefixCache by hand: the worked example, copy-on-write, eviction order, duplicates, flush, reach."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.base.errors import InvariantBroken
from foreword.base.params import EVERYTHING, Reach
from foreword.cache.identity import Chain, Space, Tenant, root
from foreword.cache.lease import Lease
from foreword.cache.orders import Copy
from foreword.cache.prefix_cache import PrefixCache

BLOCK = 4
MODEL = {"weights": "w", "adapter": "none"}
ROOT = root(MODEL, BLOCK)
A = [256, 257, 10, 11, 12, 13, 14, 15, 16]
B = [256, 257, 10, 11, 12, 13, 99, 98]


def chain(tokens: list[int], salt: bytes = b"", model: dict[str, str] = MODEL) -> Chain:
    return Chain(Space(root(model, BLOCK), BLOCK), tokens, tenant=Tenant(salt.decode(), salt))


def run(cache: PrefixCache, tokens: Chain, reach: Reach = EVERYTHING) -> Lease:
    lease = cache.acquire(tokens, reach)
    assert cache.reserve(lease, lease.matched_tokens, len(tokens)) is not None
    cache.publish(lease, tokens, len(tokens))
    return lease


def test_the_worked_example() -> None:
    cache = PrefixCache(16, BLOCK)
    a = chain(A)
    held = run(cache, a)
    assert len(a.hashes) == 2
    assert held.published == 2
    assert len(held.blocks) == 3  # the third holds the tail 16, under no hash
    assert cache.match(chain(B), EVERYTHING) * BLOCK == 4  # full blocks
    assert cache.acquire(chain(B), EVERYTHING).matched_tokens == 6  # and the tail 12, 13 out of A's second block
    for other in (
        chain(A, model=MODEL | {"adapter": "x"}),
        chain(A, model=MODEL | {"weights": "v"}),
        chain(A, b"tenant"),
    ):
        assert not set(other.hashes) & set(a.hashes)
        assert cache.match(other, EVERYTHING) == 0
    assert cache.match(a, EVERYTHING) == 2  # the owner still hits


def test_a_writer_into_a_shared_block_gets_a_private_copy() -> None:
    cache = PrefixCache(16, BLOCK)
    memory = [[0] * BLOCK for _ in range(16)]
    owner = run(cache, chain(A))
    for i, token in enumerate(A):
        memory[owner.blocks[i // BLOCK]][i % BLOCK] = token
    writer = cache.acquire(chain(B), Reach(read_tokens=4))
    shared = writer.blocks[0]
    copies = cache.reserve(writer, 1, 2)
    assert copies == (Copy(shared, writer.blocks[0], 1),)
    memory[writer.blocks[0]][:1] = memory[shared][:1]
    memory[writer.blocks[0]][1] = 999
    assert writer.blocks[0] != shared == owner.blocks[0]
    assert memory[writer.blocks[0]][:2] == [256, 999]
    assert memory[shared] == [256, 257, 10, 11]
    cache.check([owner, writer])  # the source stays held until the copy is committed
    cache.publish(writer, chain(B), 0)
    assert writer.sources == []
    cache.release(owner)
    cache.release(writer)
    cache.check([])


def test_the_example_script_runs() -> None:
    script = Path(__file__).parents[2] / "examples" / "prefix_cache_reference.py"
    out = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout
    assert "full-block hit of 4 tokens: [256, 257, 10, 11]" in out
    assert "private copy: [256, 999]" in out
    assert "still starts with 256" in out


@pytest.mark.parametrize("length", [1, 2, 4, 5, 7, 8, 9, 12, 13])
def test_a_match_covers_all_but_the_last_token(length: int) -> None:
    cache = PrefixCache(16, BLOCK)
    cache.release(run(cache, chain(list(range(20)))))
    lease = cache.acquire(chain(list(range(length))), EVERYTHING)
    assert lease.matched_tokens == length - 1
    assert cache.match(chain(list(range(length))), EVERYTHING) == (length - 1) // BLOCK
    assert cache.state().held == -(-(length - 1) // BLOCK)


def test_the_tail_of_a_match_is_copied_and_never_shared() -> None:
    cache = PrefixCache(16, BLOCK)
    cache.release(run(cache, chain([1, 2, 3, 4, 5, 6, 7, 8])))
    lease = cache.acquire(chain([1, 2, 3, 4, 5, 6, 9, 9, 9]), EVERYTHING)
    shared = lease.blocks[1]
    assert lease.matched_tokens == 6
    assert cache.reserve(lease, 6, 9) == (Copy(shared, lease.blocks[1], 2),)
    assert shared not in lease.blocks
    cache.publish(lease, chain([1, 2, 3, 4, 5, 6, 9, 9, 9]), 9)
    assert cache.match(chain([1, 2, 3, 4, 5, 6, 7, 8, 0]), EVERYTHING) == 2
    assert cache.match(chain([1, 2, 3, 4, 5, 6, 9, 9, 0]), EVERYTHING) == 2
    cache.release(lease)
    cache.check([])


@given(
    st.lists(st.tuples(st.sampled_from([b"", b"x"]), st.lists(st.integers(0, 3), min_size=4, max_size=4)), max_size=12),
    st.sampled_from([b"", b"x"]),
    st.lists(st.sampled_from([0, 1, 2, 3, 256, 2**31]), min_size=1, max_size=4),
)
def test_the_nearest_child_is_the_best_of_all(
    known: list[tuple[bytes, list[int]]], salt: bytes, tokens: list[int]
) -> None:
    cache = PrefixCache(32, BLOCK)
    for other, content in known:
        cache.release(run(cache, chain(content, other)))
    best = 0
    for other, content in known:
        common = 0
        while other == salt and common < len(tokens) and content[common] == tokens[common]:
            common += 1
        best = max(best, common)
    assert cache.acquire(chain([*tokens, 9], salt), EVERYTHING).matched_tokens == best


def test_a_tail_is_never_taken_from_another_tenant() -> None:
    cache = PrefixCache(16, BLOCK)
    cache.release(run(cache, chain([1, 2, 3, 4], b"red")))
    assert cache.acquire(chain([1, 2, 3, 9, 9], b"blue"), EVERYTHING).matched_tokens == 0
    assert cache.acquire(chain([1, 2, 3, 9, 9]), EVERYTHING).matched_tokens == 0
    assert cache.acquire(chain([1, 2, 3, 9, 9], b"red"), EVERYTHING).matched_tokens == 3


def test_tails_are_evicted_first_and_old_ones_before_young() -> None:
    cache = PrefixCache(4, BLOCK)
    old, young = chain([1] * 9), chain([2] * 9)
    cache.release(run(cache, chain([1] * 8)))
    cache.release(run(cache, chain([2] * 8)))
    assert cache.state().cached == 4
    lease = cache.acquire(chain([3] * 3), EVERYTHING)
    assert cache.reserve(lease, 0, 3) == ()
    assert (cache.match(old, EVERYTHING), cache.match(young, EVERYTHING)) == (1, 2)
    assert cache.reserve(lease, 3, 8) == ()
    assert (cache.match(old, EVERYTHING), cache.match(young, EVERYTHING)) == (0, 2)
    cache.check([lease])


def test_using_a_prefix_makes_all_of_it_young_again() -> None:
    cache = PrefixCache(4, BLOCK)
    first, second = chain([1] * 9), chain([2] * 9)
    cache.release(run(cache, chain([1] * 8)))
    cache.release(run(cache, chain([2] * 8)))
    cache.release(cache.acquire(first, EVERYTHING))
    lease = cache.acquire(chain([3] * 8), EVERYTHING)
    assert cache.reserve(lease, 0, 8) == ()
    assert (cache.match(first, EVERYTHING), cache.match(second, EVERYTHING)) == (2, 0)


def test_no_room_changes_nothing() -> None:
    cache = PrefixCache(3, BLOCK)
    lease = run(cache, chain([1] * 9))
    other = cache.acquire(chain([2] * 9), EVERYTHING)
    before = cache.state()
    assert cache.reserve(other, 0, 9) is None
    assert (cache.state(), other.blocks) == (before, ())
    cache.check([lease, other])


def test_a_duplicate_stays_private_and_holds_the_published_one() -> None:
    cache = PrefixCache(8, BLOCK)
    one, two = chain([1] * 9), chain([1] * 9)
    first, second = cache.acquire(one, EVERYTHING), cache.acquire(two, EVERYTHING)
    for lease, tokens in ((first, one), (second, two)):
        cache.reserve(lease, 0, 9)
        cache.publish(lease, tokens, 8)
    assert first.blocks[:2] != second.blocks[:2]
    assert second.shadows == {0: first.blocks[0], 1: first.blocks[1]}
    cache.release(first)
    cache.check([second])
    assert cache.state().cached == 0  # still held through the second lease
    cache.release(second)
    cache.check([])
    assert cache.state().cached == 2


def test_flush_forgets_and_leases_of_before_publish_nothing() -> None:
    cache = PrefixCache(8, BLOCK)
    tokens = chain([1] * 17)
    running = cache.acquire(tokens, EVERYTHING)
    cache.reserve(running, 0, 17)
    cache.publish(running, tokens, 8)
    flushed = cache.flush()
    assert (flushed.dropped, flushed.still_held) == (0, 5)
    cache.publish(running, tokens, 16)
    assert cache.match(tokens, EVERYTHING) == 0
    cache.check([running])
    cache.release(running)
    assert cache.state().free == 8
    cache.release(run(cache, tokens))
    assert cache.match(tokens, EVERYTHING) == 4


@pytest.mark.parametrize(("store", "published"), [(None, 4), (0, 0), (1, 1), (4, 1), (5, 2), (16, 4), (99, 4)])
def test_stored_are_the_full_blocks_that_hold_one_of_the_tokens(store: int | None, published: int) -> None:
    cache = PrefixCache(8, BLOCK)
    cache.release(run(cache, chain([1] * 17), Reach(store_tokens=store)))
    assert cache.match(chain([1] * 17), EVERYTHING) == published


@pytest.mark.parametrize(("read", "matched"), [(None, 16), (0, 0), (3, 3), (4, 4), (15, 15), (16, 16), (99, 16)])
def test_reads_never_pass_the_limit(read: int | None, matched: int) -> None:
    cache = PrefixCache(8, BLOCK)
    cache.release(run(cache, chain([1] * 17)))
    assert cache.acquire(chain([1] * 17), Reach(read_tokens=read)).matched_tokens == matched


def test_reasons() -> None:
    cache = PrefixCache(16, BLOCK)

    def reason(tokens: list[int], reach: Reach = EVERYTHING) -> str:
        lease = cache.acquire(chain(tokens), reach)
        cache.release(lease)
        return cache.explain(chain(tokens), reach, lease.matched_tokens).reason

    assert reason([1] * 9) == "never_seen"
    cache.release(run(cache, chain([1] * 9)))
    assert reason([1] * 9) == "complete"
    assert reason([1] * 4) == "complete"
    assert reason([1, 2, 2]) == "too_short"
    assert reason([1] * 4 + [2] * 9) == "diverged"
    assert reason([2] * 9) == "diverged"
    assert reason([1] * 17) == "never_seen"
    assert reason([1] * 9, Reach(read_tokens=5)) == "prefix_length"
    off = PrefixCache(16, BLOCK, off="cache_disabled")
    assert off.explain(chain([1] * 9), EVERYTHING, 0).reason == "cache_disabled"


def test_off_means_nothing_is_found() -> None:
    cache = PrefixCache(16, BLOCK, off="cache_disabled")
    cache.release(run(cache, chain([1] * 9)))
    assert cache.match(chain([1] * 9), EVERYTHING) == 0
    assert cache.state().free == 16


def test_check_sees_a_leak() -> None:
    cache = PrefixCache(4, BLOCK)
    run(cache, chain([1] * 5))
    with pytest.raises(InvariantBroken, match="held by other leases"):
        cache.check([])
