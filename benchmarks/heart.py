"""What the bookkeeping costs, without a model: `python benchmarks/heart.py [--json]`.

Times are medians over repeats in one process on one core, in milliseconds unless the name says otherwise.
"""

import argparse
import gc
import json
import statistics
import time
from array import array
from collections.abc import Callable
from hashlib import sha256

from foreword.base.ids import RequestId
from foreword.base.params import EVERYTHING, Sampling
from foreword.cache.identity import Chain, Space, root
from foreword.cache.prefix_cache import PrefixCache
from foreword.schedule.plan import Sample, StepResult
from foreword.schedule.request import Submission
from foreword.schedule.scheduler import Scheduler

BLOCK = 16
SPACE = Space(root({"weights": "benchmark"}, BLOCK), BLOCK)


def median_ms(work: Callable[[], object], repeats: int = 15) -> float:
    """Median wall time of one call."""
    times = list[float]()
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def long_prompt(num_tokens: int = 131_072) -> dict[str, float]:
    """Hash and look up one very long prompt that is cached whole."""
    tokens = array("I", (i * 2654435761 % 49152 for i in range(num_tokens)))
    cache = PrefixCache(num_tokens // BLOCK + 64, BLOCK)
    chain = Chain(SPACE, tokens)
    lease = cache.acquire(chain, EVERYTHING)
    cache.reserve(lease, 0, num_tokens)
    cache.publish(lease, chain, num_tokens)
    cache.release(lease)
    raw, step = tokens.tobytes(), 4 * BLOCK
    pieces = [raw[i : i + step] for i in range(0, len(raw), step)]

    def bare() -> None:
        parent = SPACE.root
        for piece in pieces:
            parent = sha256(parent + piece).digest()

    acquires, releases = list[float](), list[float]()
    for _ in range(15):
        start = time.perf_counter()
        lease = cache.acquire(chain, EVERYTHING)
        middle = time.perf_counter()
        cache.release(lease)
        releases.append((time.perf_counter() - middle) * 1e3)
        acquires.append((middle - start) * 1e3)
    return {
        "sha256 over ready bytes, 131072 tokens": median_ms(bare),
        "chain of 131072 tokens": median_ms(lambda: Chain(SPACE, tokens)),
        "match of 131072 cached tokens": median_ms(lambda: cache.match(chain, EVERYTHING)),
        "acquire of 131072 cached tokens": statistics.median(acquires),
        "release of 131072 tokens": statistics.median(releases),
    }


def running(num_requests: int = 256, num_tokens: int = 1_000) -> dict[str, float]:
    """Plan and commit one decode step of many running requests."""
    cache = PrefixCache(num_requests * (num_tokens // BLOCK + 8), BLOCK)
    scheduler = Scheduler(cache, max_batch_tokens=num_requests * num_tokens, max_running=num_requests)
    for i in range(num_requests):
        chain = Chain(SPACE, [i, *range(num_tokens - 1)])
        scheduler.add(Submission(id=RequestId(str(i)), chain=chain, sampling=Sampling(max_tokens=200), arrival_s=0))
    plans, commits = list[float](), list[float]()
    for step in range(60):
        start = time.perf_counter()
        plan = scheduler.plan(0)
        middle = time.perf_counter()
        assert plan is not None
        result = StepResult({chunk.request: Sample(1) for chunk in plan.chunks})
        before = time.perf_counter()
        scheduler.commit(plan, result, 0)
        if step:
            plans.append((middle - start) * 1e3)
            commits.append((time.perf_counter() - before) * 1e3)
    both = [a + b for a, b in zip(plans, commits, strict=True)]
    return {
        "plan, 256 requests of 1000 tokens": statistics.median(plans),
        "commit, 256 requests of 1000 tokens": statistics.median(commits),
        "plan + commit, 256 requests of 1000 tokens": statistics.median(both),
    }


def eviction(num_blocks: int) -> dict[str, float]:
    """Evict every block of a full pool, by reserving all of it for somebody else."""
    cache = PrefixCache(num_blocks, BLOCK)
    for i in range(num_blocks // 64):
        chain = Chain(SPACE, [i, *range(64 * BLOCK - 1)])
        lease = cache.acquire(chain, EVERYTHING)
        cache.reserve(lease, 0, 64 * BLOCK)
        cache.publish(lease, chain, 64 * BLOCK)
        cache.release(lease)
    lease = cache.acquire(Chain(SPACE, [0xFFFF]), EVERYTHING)
    start = time.perf_counter()
    cache.reserve(lease, 0, num_blocks * BLOCK)
    spent = time.perf_counter() - start
    return {f"evict and hand out a block, pool of {num_blocks}, us": spent / num_blocks * 1e6}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    gc.freeze()
    rows = long_prompt() | running() | eviction(6_400) | eviction(102_400)
    if as_json:
        print(json.dumps({name: round(value, 4) for name, value in rows.items()}))
        return
    for name, value in rows.items():
        print(f"{name:55s} {value:9.3f}")


if __name__ == "__main__":
    main()
