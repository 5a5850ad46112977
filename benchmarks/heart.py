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
from foreword.cache.explain import Explanation
from foreword.cache.identity import Chain, Space, root
from foreword.cache.prefix_cache import PrefixCache
from foreword.cache.view import Walk
from foreword.engine.engine import Engine
from foreword.engine.sockets import MonotonicClock, Nobody
from foreword.engine.worker import Worker
from foreword.front.advice import Advisor
from foreword.front.where import Source
from foreword.schedule.admission import limits
from foreword.schedule.plan import Sample, StepResult
from foreword.schedule.request import Submission
from foreword.schedule.scheduler import Scheduler
from foreword.telemetry import Metrics
from foreword.testing.fakes import FakeRunner
from foreword.text.tokenizer import Tokenizer

BLOCK = 16
LIMITS = limits(64, BLOCK, 1024)
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

    news = [array("I", [i, *tokens[1:]]) for i in range(15)]
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
        "chain of 131072 tokens that nobody sent before": median_ms(lambda: Chain(SPACE, news.pop())),
        "chain of 131072 tokens": median_ms(lambda: Chain(SPACE, tokens)),
        "match of 131072 cached tokens": median_ms(lambda: cache.match(chain, EVERYTHING)),
        "acquire of 131072 cached tokens": statistics.median(acquires),
        "release of 131072 tokens": statistics.median(releases),
    }


def explained(num_tokens: int = 131_072) -> dict[str, float]:
    """Hash a very long prompt that is cached but for its end, find all of it, and say why there is no more.

    The end is unlike what is cached; then, after a reload and the beginning computed again, known of other weights.
    """
    cache = PrefixCache(2 * num_tokens // BLOCK + 64, BLOCK)
    tokens = array("I", (i * 2654435761 % 49152 for i in range(num_tokens)))
    rows = dict[str, float]()
    for state, space in (("", SPACE), (" after a reload", Space(root({"weights": "others"}, BLOCK), BLOCK))):
        lease = cache.acquire(Chain(space, tokens), EVERYTHING)
        end = num_tokens - (len(rows) and 4 * BLOCK)
        cache.reserve(lease, 0, end)
        cache.publish(lease, Chain(space, tokens[:end]), end)
        cache.release(lease)
        asked = tokens if rows else tokens[:-BLOCK] + array("I", range(BLOCK))
        reasons = set[str]()

        def look(space: Space = space, asked: "array[int]" = asked, reasons: set[str] = reasons) -> None:
            chain = Chain(space, asked)
            _, found = cache.find(chain, EVERYTHING)
            reasons.add(cache.explain(chain, EVERYTHING, found).reason)

        rows[f"hash, find and explain of {num_tokens} tokens{state}"] = median_ms(look)
        assert reasons == {"other_namespace" if state else "diverged"}, reasons
        cache.flush()
    return rows


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


def status(num_blocks: int = 102_400) -> dict[str, float]:
    """What a status page costs with a full pool: the views of the tree, its longest portion, and a scrape."""
    rows = dict[str, float]()
    for shape, length in (("prompts of 64 blocks", 64), ("prompts of one block", 1), ("prompts of 8192 blocks", 8192)):
        cache = PrefixCache(num_blocks, BLOCK)
        for i in range(num_blocks // length):
            cache.advance(float(i))
            chain = Chain(SPACE, [i * 2654435761 % 2**32, *range(length * BLOCK - 1)])
            lease = cache.acquire(chain, EVERYTHING)
            cache.reserve(lease, 0, length * BLOCK)
            cache.publish(lease, chain, length * BLOCK)
            cache.release(lease)
        walks, portions = list[float](), list[float]()
        for _ in range(9):
            walk, more, spent = Walk(limit=100, order="hits"), True, list[float]()
            while more:
                start = time.perf_counter()
                more = cache.look(walk)
                spent.append((time.perf_counter() - start) * 1e3)
            walks.append(sum(spent))
            portions.append(max(spent))
        rows[f"tree of {num_blocks} blocks, {shape}: 100 nodes"] = statistics.median(walks)
        rows[f"... longest wait of a step for it, {shape}"] = statistics.median(portions)
        scheduler = Scheduler(cache, max_batch_tokens=1024, max_running=64)
        worker = Worker(Engine(scheduler, FakeRunner(1, BLOCK), MonotonicClock(), Nobody()), LIMITS, max_live=64)
        metrics = Metrics()
        rows[f"state, {shape}"] = median_ms(worker.state)
        rows[f"/metrics, {shape}"] = median_ms(lambda worker=worker, metrics=metrics: metrics.render(worker.state()))
    return rows


def advice(num_tokens: int) -> dict[str, float]:
    """What hearing of a request costs the thread that read its answer."""
    rest = [i * 2654435761 % 49152 for i in range(num_tokens)]
    advisor, times = Advisor(), list[float]()
    for i in range(40):
        ids = (*range(40), i, *rest)
        chain, source = Chain(SPACE, ids), Source(Tokenizer(""), ids, ids)
        start = time.perf_counter()
        advisor.hear(chain, source, Explanation("diverged", 40), float(i))
        times.append((time.perf_counter() - start) * 1e3)
    return {f"advice hears of a changed prompt of {num_tokens} tokens": statistics.median(times)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    gc.freeze()
    rows = long_prompt() | explained() | running() | eviction(6_400) | eviction(102_400) | status()
    rows |= advice(1_024) | advice(131_072)
    if as_json:
        print(json.dumps({name: round(value, 4) for name, value in rows.items()}))
        return
    for name, value in rows.items():
        print(f"{name:70s} {value:9.3f}")


if __name__ == "__main__":
    main()
