"""How many tokens a request gets out of a step's budget. Hand out tokens, not phases."""


def grant(start: int, wanted: int, spare: int, block_size: int) -> int:
    """Tokens to compute from position `start` when `wanted` are known and `spare` may be spent.

    A run that is cut short by the budget ends on a block border: then nobody is ever parked with a half-written
    block, and every block is claimed, and computed, by one request.

    >>> grant(0, 100, 64, 16), grant(0, 100, 70, 16), grant(3, 100, 8, 16), grant(96, 4, 70, 16)
    (64, 64, 0, 4)
    """
    if wanted <= spare:
        return wanted
    return max(0, (start + spare) // block_size * block_size - start)
