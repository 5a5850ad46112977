"""The field's worked example of a prefix cache, run on Foreword's own heart. Needs no model and no torch.

python examples/prefix_cache_reference.py
"""

from foreword.base.params import EVERYTHING
from foreword.cache.identity import Chain, Space, Tenant, root
from foreword.cache.lease import Lease
from foreword.cache.orders import Copy
from foreword.cache.prefix_cache import PrefixCache

BLOCK = 4
A = [256, 257, 10, 11, 12, 13, 14, 15, 16]
B = [256, 257, 10, 11, 12, 13, 99, 98]
MODEL = {"weights": "sha256 of the files", "adapter": "none"}


class Memory:
    """Token ids stand in for keys and values: one list a block."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [[0] * BLOCK for _ in range(num_blocks)]

    def copy(self, copies: tuple[Copy, ...] | None) -> None:
        """Do what the cache ordered."""
        if copies is None:
            raise SystemExit("no room")
        for copy in copies:
            self.blocks[copy.target][: copy.num_tokens] = self.blocks[copy.source][: copy.num_tokens]

    def write(self, lease: Lease, start: int, tokens: list[int]) -> None:
        """Put tokens at positions from `start` on, through the block table."""
        for position, token in enumerate(tokens, start):
            self.blocks[lease.blocks[position // BLOCK]][position % BLOCK] = token


def compute(cache: PrefixCache, memory: Memory, chain: Chain) -> tuple[Lease, int]:
    """Run one prompt: reuse what is there, write the rest, publish. The lease, and how many tokens were reused."""
    lease = cache.acquire(chain, EVERYTHING)
    reused = lease.matched_tokens
    memory.copy(cache.reserve(lease, reused, len(chain)))
    memory.write(lease, reused, list(chain.tokens[reused:]))
    cache.publish(lease, chain, len(chain))
    return lease, reused


def main() -> None:
    """Print the example step by step."""
    cache, memory = PrefixCache(num_blocks=16, block_size=BLOCK), Memory(16)
    model = Space(root(MODEL, BLOCK), BLOCK)

    a, b = Chain(model, A), Chain(model, B)
    held_a, reused = compute(cache, memory, a)
    print(f"A = {A}")
    print(f"  full blocks {[A[:4], A[4:8]]}, hashes {[h.hex()[:8] for h in a.hashes]}; the tail {A[8:]} is in no block")
    print(f"  reused {reused} tokens, computed {len(A) - reused}")

    full = cache.match(b, EVERYTHING) * BLOCK
    _, reused = compute(cache, memory, b)
    print(f"B = {B}")
    print(f"  full-block hit of {full} tokens: {B[:full]}")
    print(
        f"  with the tail of the match, copied to a private block, {reused}: {B[:reused]}; computed {len(B) - reused}"
    )

    for what, other in (
        ("another adapter", Chain(Space(root(MODEL | {"adapter": "sha256 of its files"}, BLOCK), BLOCK), A)),
        ("another model revision", Chain(Space(root(MODEL | {"weights": "other bytes"}, BLOCK), BLOCK), A)),
        ("another tenant", Chain(model, A, tenant=Tenant("red", b"its salt"))),
    ):
        same = set(other.hashes) & set(a.hashes)
        print(f"A for {what}: hashes {[h.hex()[:8] for h in other.hashes]}, {len(same)} in common")

    shared = held_a.blocks[0]
    writer = cache.acquire(b, EVERYTHING)
    memory.copy(cache.reserve(writer, 1, 2))
    memory.write(writer, 1, [999])
    print(f"a writer at position 1 of shared block {shared} gets a private copy: {memory.blocks[writer.blocks[0]][:2]}")
    print(f"  the shared block still starts with {memory.blocks[shared][0]}: {memory.blocks[shared]}")


if __name__ == "__main__":
    main()
