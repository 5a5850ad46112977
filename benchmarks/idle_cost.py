"""What the cache costs a request that finds nothing in it: `python benchmarks/idle_cost.py [--pairs 40]`.

    off      the same server without a cache
    roomy    a cache with free blocks
    full     a cache whose every block holds something else, so that each request evicts as many as it needs

The same prompt, which nobody has sent before, goes to all three, one right after the other in random order; its time is
from submission to first token. What is printed is the median over prompts of each arm's time by that of `off`.
Wants an otherwise idle machine.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack

from foreword import LLM

TOKENS = 320
ROOMY, FULL = "4000", "200"
"""Blocks of each pool. A prompt takes 20."""


def prompt(seed: object) -> list[int]:
    """Token ids that no other seed gives."""
    return random.Random(str(seed)).choices(range(1000, 40_000), k=TOKENS)


def ask(llm: LLM, ids: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and prompt tokens from the cache."""
    start = time.perf_counter()
    answer = llm.generate(ids, max_tokens=1, ignore_eos=True)[0]
    return time.perf_counter() - start, answer.cached_tokens


def measure(pairs: int) -> dict[str, list[float]]:
    """Seconds of each prompt, by arm."""
    found = {name: list[float]() for name in ("off", "roomy", "full")}
    with ExitStack() as stack:
        llms: Mapping[str, LLM] = {
            "off": stack.enter_context(LLM(device="cpu", kv_cache=FULL, cache=False)),
            "roomy": stack.enter_context(LLM(device="cpu", kv_cache=ROOMY)),
            "full": stack.enter_context(LLM(device="cpu", kv_cache=FULL)),
        }
        for i in range(12):  # fills the small pool, and warms all
            for llm in llms.values():
                ask(llm, prompt(("warm", i)))
        for i in range(pairs):
            ids = prompt(i)
            for name in random.sample(list(llms), len(llms)):
                seconds, cached = ask(llms[name], ids)
                if cached:
                    raise SystemExit(f"{name}: {cached} tokens of a new prompt were cached")
                found[name].append(seconds)
        again = ask(llms["roomy"], prompt(0))[1]
        if not again:
            raise SystemExit("roomy: the same prompt again hit nothing, so the cache was not on")
    return found


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    times = measure(parser.parse_args().pairs)
    row: dict[str, object] = {"pairs": len(times["off"])}
    for name, seconds in times.items():
        row[f"{name}_ms"] = round(statistics.median(seconds) * 1e3, 1)
    for name in ("roomy", "full"):
        ratios = [mine / off for mine, off in zip(times[name], times["off"], strict=True)]
        row[f"{name}_costs_percent"] = round(100 * (statistics.median(ratios) - 1), 2)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
