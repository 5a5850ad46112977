"""A cache too simple to be wrong: the set of all full-block prefixes that anybody ever computed."""

from collections.abc import Sequence


class NaiveCache:
    """Remembers prefixes as tuples, never evicts. A real cache never finds more than this one knows."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._known: set[tuple[bytes, tuple[int, ...]]] = set()

    def publish(self, world: bytes, tokens: Sequence[int]) -> None:
        """These tokens were computed in this world (tenant, model, ...), all of them."""
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            self._known.add((world, tuple(tokens[:end])))

    def match(self, world: bytes, tokens: Sequence[int], read_tokens: int | None = None) -> int:
        """Leading tokens that some known full-block prefix begins with as well; never the last token."""
        limit = len(tokens) - 1 if read_tokens is None else min(len(tokens) - 1, read_tokens)
        best = 0
        for where, known in self._known:
            common = 0
            while where == world and common < min(limit, len(known)) and known[common] == tokens[common]:
                common += 1
            best = max(best, common)
        return best

    def forget(self) -> None:
        """Flush."""
        self._known.clear()
