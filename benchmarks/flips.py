"""Does the cache change answers?

    python benchmarks/flips.py [--prompts 1000]

Pieces of Python's own manual, 40 to 100 tokens each and no two beginning alike, are answered greedily, with the five
best log-probabilities of every token, in groups as they come:

    cold     right after a flush
    again    after another flush, in another order and in other groups: the control, which has to be 0 as well
    warm     once more, with nothing flushed
    partial  after a flush and a prompt that shares its beginning, up to any token, and goes on otherwise
    off      by a model of the same weights without a cache

A flip is an answer whose tokens are not those of `off`; the gap is the largest difference of any log-probability. The
exit status is 0 if nothing flipped, no gap opened, and both warm arms took tokens from the cache.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

from foreword import LLM, Result
from foreword.front.ask import TokenText

GROUP = 50
LENGTHS = (40, 100)
TOP = 5


@dataclass(slots=True)
class Arm:
    """What one way of asking came to."""

    flips: int = 0
    gap: float = 0.0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    hits: int = 0


def pieces(llm: LLM, count: int, draw: random.Random) -> list[list[int]]:
    """Prompts as token ids."""
    ids = llm.assembly.front.served.tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))
    found: dict[int, list[int]] = {}
    places = list(range(len(ids) - max(LENGTHS)))
    draw.shuffle(places)
    for place in places:
        found.setdefault(ids[place], list(ids[place : place + draw.randint(*LENGTHS)]))
        if len(found) == count:
            return list(found.values())
    raise SystemExit(f"the manual has only {len(found)} pieces that begin differently; ask for fewer --prompts")


def grouped(items: Sequence[int], size: int = GROUP) -> Iterator[Sequence[int]]:
    """In pieces of `size`."""
    return (items[i : i + size] for i in range(0, len(items), size))


def ask(llm: LLM, prompts: Sequence[list[int]], max_tokens: int) -> list[Result]:
    """Greedy answers with log-probabilities, all prompts at once."""
    return llm.generate(prompts, max_tokens=max_tokens, temperature=0, logprobs=TOP, ignore_eos=True)


def logprobs(token: TokenText) -> dict[int, float]:
    """The log-probabilities of one position, by token."""
    best = {other: logprob for other, _, _, logprob in token.top}
    return best if token.logprob is None else {**best, token.token: token.logprob}


def compare(arm: Arm, result: Result, truth: Result) -> None:
    """Count one answer."""
    arm.prompt_tokens += result.prompt_tokens
    arm.cached_tokens += result.cached_tokens
    arm.hits += result.cached_tokens > 0
    arm.flips += result.token_ids != truth.token_ids
    for one, other in zip(result.logprobs or (), truth.logprobs or (), strict=True):
        if one.token != other.token:
            break  # from here on they are answers to different questions
        ours, theirs = logprobs(one), logprobs(other)
        arm.gap = max(arm.gap, *(abs(ours.get(t, math.inf) - p) for t, p in theirs.items()))


def measure(count: int, max_tokens: int) -> dict[str, Arm]:
    """All arms, group by group."""
    draw = random.Random(3)
    arms = {name: Arm() for name in ("cold", "again", "warm", "partial")}
    with LLM(kv_cache="2048", device="cpu") as llm, LLM(cache=False, kv_cache="1024", device="cpu") as off:
        prompts, flush = pieces(llm, count, draw), llm.assembly.worker.flush
        if llm.assembly.root != off.assembly.root:
            raise SystemExit("the two models differ; nothing can be compared")
        truths: list[Result] = []
        for group in grouped(range(count)):
            mine = [prompts[i] for i in group]
            truths += (truth := ask(off, mine, max_tokens))
            flush()
            cold, warm = ask(llm, mine, max_tokens), ask(llm, mine, max_tokens)
            flush()
            others = [[*p[: draw.randrange(1, len(p))], *q[1:]] for p, q in zip(mine, mine[1:] + mine[:1], strict=True)]
            llm.generate(others, max_tokens=1)
            for name, results in (("cold", cold), ("warm", warm), ("partial", ask(llm, mine, max_tokens))):
                for result, one in zip(results, truth, strict=True):
                    compare(arms[name], result, one)
            print(f"{group[-1] + 1:5} of {count}", end="\r", file=sys.stderr, flush=True)
        order = draw.sample(range(count), count)
        for group in grouped(order, GROUP // 2 + 7):
            flush()
            for i, result in zip(group, ask(llm, [prompts[i] for i in group], max_tokens), strict=True):
                compare(arms["again"], result, truths[i])
    return arms


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=4, help="of each answer")
    parser.add_argument("--json", action="store_true")
    wish = parser.parse_args()
    start = time.perf_counter()
    arms = measure(wish.prompts, wish.tokens)
    for name, arm in arms.items():
        share = arm.cached_tokens / arm.prompt_tokens
        row = {"flips": arm.flips, "gap": arm.gap, "hits": arm.hits, "cached": round(share, 4)}
        if wish.json:
            print(json.dumps({"arm": name, "prompts": wish.prompts, **row}))
        else:
            print(
                f"{name:8} {arm.flips} of {wish.prompts} flipped, largest gap {arm.gap:g};"
                f" {arm.hits} hits, {100 * share:.1f} % of the prompt tokens cached"
            )
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    clean = all(arm.flips == 0 and arm.gap == 0 for arm in arms.values())
    return 0 if clean and all(arms[name].hits == wish.prompts for name in ("warm", "partial")) else 1


if __name__ == "__main__":
    sys.exit(main())
