"""Block identity: golden vectors, canonical bytes, what must and must not change a hash."""

import hashlib
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.cache import identity
from foreword.cache.identity import ALONE, Chain, Space, Tenant, root

MODEL = {"weights": "abc", "dtype": "bfloat16"}


def test_golden_vectors() -> None:
    """Format 1 never changes; a new format gets a new name in the root."""
    base = root(MODEL, 4)
    assert base.hex() == "49262d209b98edb86cebe0c124b53c5bc637f7bc244d8d117cb457dbac1cd718"
    plain = Chain(Space(base, 4), [256, 257, 10, 11, 12, 13, 14, 15, 16])
    assert [h.hex() for h in plain.hashes] == [
        "4e41547bd53aa1c0f18f4dd87ca6d9f23695765468c3bb5606f01e04cbdece0f",
        "a3582ac1c34de6013d9613274db2371532a7e702ff17a03fb635c6ac46210ab7",
    ]
    salted = Chain(Space(base, 4), [256, 257, 10, 11], extras={0: (b"salt", b"")})
    assert salted.hashes[0].hex() == "f7a69d4d55af9bb5a2ac687bfc6f5c018a794eb11eedfb6b5aba130e793a53db"


def test_the_canonical_bytes_are_those_of_the_docstring() -> None:
    """Written a second time from the docstring alone, with struct."""

    def text(raw: bytes) -> bytes:
        return struct.pack("<I", len(raw)) + raw

    sure = text(b"foreword kv 1") + struct.pack("<II", 4, 2)
    sure += text(b"dtype") + text(b"bfloat16") + text(b"weights") + text(b"abc")
    base = hashlib.sha256(sure).digest()
    assert root(MODEL, 4) == base
    first = hashlib.sha256(base + struct.pack("<I4I", 4, 1, 2, 3, 4) + struct.pack("<I", 0)).digest()
    extras = struct.pack("<I", 2) + text(b"image") + text(b"tenant")
    second = hashlib.sha256(first + struct.pack("<I4I", 4, 5, 6, 7, 8) + extras).digest()
    assert Chain(Space(root(MODEL, 4), 4), [1, 2, 3, 4, 5, 6, 7, 8, 9], extras={1: (b"image", b"tenant")}).hashes == [
        first,
        second,
    ]


def naive(space: Space, tokens: list[int], extras: dict[int, bytes], size: int) -> list[bytes]:
    """Block after block, nothing remembered; every extra is alone in its block."""
    hashes = list[bytes]()
    for i in range(len(tokens) // size):
        own = struct.pack("<II", 1, len(extras[i])) + extras[i] if i in extras else bytes(4)
        ids = struct.pack(f"<I{size}I", size, *tokens[i * size : (i + 1) * size])
        hashes.append(hashlib.sha256((hashes[-1] if hashes else space.root) + ids + own).digest())
    return hashes


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 400), max_size=4), st.integers(0, 401), st.sampled_from([1, 3]), st.booleans(), st.data()
)
def test_what_is_remembered_of_long_prompts_shows_in_no_hash(
    changes: list[int], length: int, size: int, salted: bool, data: st.DataObject
) -> None:
    tenant = Tenant.named("red") if salted else ALONE
    extras = data.draw(st.dictionaries(st.integers(1, 140), st.just(b"image"), max_size=2))
    space = Space(root(MODEL, size), size)
    tokens = [i % 7 for i in range(length)]
    for at in (*changes, None):
        salt = {0: tenant.salt} if salted else {}
        chain = Chain(space, tokens, tenant=tenant, extras={i: (extra,) for i, extra in extras.items()})
        assert chain.hashes == naive(space, tokens, {**extras, **salt}, size)
        if at is not None and at < length:
            tokens[at] = 9


def test_a_long_prompt_that_comes_again_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = list[bytes]()

    def counted(raw: bytes) -> object:
        hashed.append(raw)
        return hashlib.sha256(raw)

    monkeypatch.setattr("foreword.cache.identity.sha256", counted)
    space = Space(root({"weights": "of this test alone"}, 4), 4)
    tokens = [i * 7919 % 1000 for i in range(4 * 300)]

    def cost(ids: list[int], tenant: Tenant = ALONE) -> int:
        hashed.clear()
        assert len(Chain(space, ids, tenant=tenant).hashes) == 300
        return len(hashed)

    assert cost(tokens) == 300
    assert cost(tokens) == 300 - 4 * 64
    assert cost([*tokens[:800], 1001, *tokens[801:]]) == 300 - 3 * 64, "again from the run on that differs"
    assert cost(tokens, Tenant.named("stranger")) == 300, "nothing of one tenant's is another's"
    assert cost(tokens, Tenant.named("stranger")) == 300 - 4 * 64


@pytest.mark.parametrize("size", [1, 7, 16, 256, 2000])
def test_what_is_remembered_of_a_long_prompt_is_small_whatever_the_blocks(size: int) -> None:
    runs = -identity._known.cache_info().misses
    Chain(Space(root({"weights": "of that test alone"}, size), size), [i % 1000 for i in range(200 * size)])
    runs += identity._known.cache_info().misses
    blocks = 200 // (runs + 1)
    assert blocks <= 64
    assert 4 * size * blocks <= max(4 * size, 4096)


def test_equal_under_another_hash_seed() -> None:
    code = (
        "from foreword.cache.identity import *;"
        " print(Chain(Space(root({'b': '1', 'a': '2'}, 2), 2), [7, 8]).hashes[0].hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert len(seen) == 1
    assert len(seen.pop().strip()) == 64


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9), st.data())
def test_appending_equals_building_at_once(tokens: list[int], block: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(tokens)))
    grown = Chain(Space(root(MODEL, block), block), tokens[:cut])
    for token in tokens[cut:]:
        grown.append(token)
    whole = Chain(Space(root(MODEL, block), block), tokens)
    assert grown.hashes == whole.hashes
    assert len(whole.hashes) == len(tokens) // block


@given(st.lists(st.integers(0, 300), min_size=8, max_size=8), st.integers(0, 7), st.integers(0, 300))
def test_any_changed_token_changes_its_block_and_all_later_ones(tokens: list[int], at: int, other: int) -> None:
    changed = [*tokens[:at], other, *tokens[at + 1 :]]
    one, two = Chain(Space(root(MODEL, 4), 4), tokens), Chain(Space(root(MODEL, 4), 4), changed)
    for block in range(2):
        assert (one.hashes[block] == two.hashes[block]) == (tokens[: 4 * block + 4] == changed[: 4 * block + 4])


def test_collision_pairs_that_weak_hashes_confuse() -> None:
    """Pairs that polynomial, order-blind and border-blind hashes confuse."""
    base = root(MODEL, 4)
    names = set[bytes]()
    prompts = (
        [1, 2, 3, 4],
        [2, 1, 3, 4],
        [1, 2, 4, 3],
        [1 + 31, 2 - 1, 3, 4],
        [4, 3, 2, 1],
        [1, 1, 4, 4],
        [0, 0, 0, 0],
        [0x01020304] * 4,
    )
    for tokens in prompts:
        names.add(Chain(Space(base, 4), tokens).hashes[0])
    names.add(Chain(Space(base, 4), [1, 2, 3, 4], extras={0: (b"",)}).hashes[0])
    names.add(Chain(Space(base, 4), [1, 2, 3, 4], extras={0: (b"a", b"b")}).hashes[0])
    names.add(Chain(Space(base, 4), [1, 2, 3, 4], extras={0: (b"ab",)}).hashes[0])
    names.add(Chain(Space(root(MODEL, 2), 2), [1, 2]).hashes[0])
    names.add(Chain(Space(root(MODEL, 2), 2), [1, 2, 3, 4]).hashes[1])
    assert len(names) == len(prompts) + 5


def test_every_ingredient_and_the_block_size_change_the_root() -> None:
    roots = [
        root(MODEL, 4),
        root(MODEL, 5),
        root(MODEL | {"dtype": "float32"}, 4),
        root(MODEL | {"more": ""}, 4),
        root({}, 4),
    ]
    roots.append(root({"weight": "sabc", "dtype": "bfloat16"}, 4))
    assert len(set(roots)) == len(roots)
    assert root(dict(reversed(MODEL.items())), 4) == root(MODEL, 4)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_ids_that_are_no_u32_are_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        Chain(Space(root(MODEL, 4), 4), [token])
