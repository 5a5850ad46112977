"""What it costs to say why: `python benchmarks/candid.py [explain] [watch]`. One JSON object a line.

    explain   the share of the steps' time that goes into finding out why matches ended, on the embedded model
    watch     what a page that is looked at costs, over HTTP, with 102,400 blocks cached in three shapes: each of its
              requests and a scrape, with nothing else to do and beside a running answer; and how far the waits from
              step to step grow. The model is a random one that keeps few keys and values

Wants an otherwise idle machine.
"""

import argparse
import json
import logging
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import httpx

from foreword import LLM
from foreword.assemble import assemble
from foreword.base.config import CacheConfig, Config, ModelConfig, ScheduleConfig, ServerConfig
from foreword.base.params import EVERYTHING
from foreword.cache.identity import Chain
from foreword.cache.prefix_cache import PrefixCache
from foreword.engine.engine import Engine
from foreword.runner.embedded import SMOLLM2, materialise
from foreword.runner.shelf import cache_folder
from foreword.server import Listener, create_app, serving
from foreword.telemetry import Metrics

BLOCK, BLOCKS = 16, 102_400
SHAPES = {"prompts of 64 blocks": 64, "prompts of one block": 1, "prompts of 8192 blocks": 8192}
PAGE = (
    "/v1/cache",
    "/v1/cache/requests",
    "/v1/cache/advice",
    "/v1/cache/tree?order=hits&limit=20",
    "/v1/cache/tree?limit=300",
    "/metrics",
)
"""What the dashboard asks for every two seconds, and a scrape."""
WAITS_S, ROUNDS = 12.0, 12


@contextmanager
def timed(owner: type, name: str) -> Iterator[list[float]]:
    """Seconds of each call of a method, while this lasts."""
    plain, spent = getattr(owner, name), list[float]()

    def measured(*args: Any, **more: Any) -> Any:
        start = time.perf_counter()
        result = plain(*args, **more)
        if result is not None:
            spent.append(time.perf_counter() - start)
        return result

    setattr(owner, name, measured)
    try:
        yield spent
    finally:
        setattr(owner, name, plain)


def explain() -> None:
    """Requests of four kinds on the real model: time spent in explaining by time of the steps."""
    words = random.Random(3)

    def text(num_tokens: int) -> list[int]:
        return words.choices(range(1000, 40_000), k=num_tokens)

    head = text(480)
    kinds: dict[str, Callable[[], list[list[int]]]] = {
        "nothing in common, the pool full": lambda: [text(320)],
        "a common head, other ends": lambda: [[*head, *text(32)]],
        "eight at once with a common head": lambda: [[*head, *text(32)] for _ in range(8)],
        "nearly all cached": lambda: [[*head, words.randrange(40_000)]],
    }
    with LLM(device="cpu", kv_cache="200") as llm:
        llm.generate(head, max_tokens=1)
        for kind, asks in kinds.items():
            llm.generate(asks(), max_tokens=1, ignore_eos=True)
            with timed(PrefixCache, "explain") as explained, timed(Engine, "step") as steps:
                for _ in range(20):
                    llm.generate(asks(), max_tokens=4, ignore_eos=True)
            row = {
                "requests": len(explained),
                "steps": len(steps),
                "explain_us": round(statistics.median(explained) * 1e6, 1),
                "explain_max_us": round(max(explained) * 1e6, 1),
                "step_ms": round(statistics.median(steps) * 1e3, 2),
                "share_percent": round(100 * sum(explained) / sum(steps), 4),
            }
            print(json.dumps({"explain": kind, **row}), flush=True)


def lean(folder: Path) -> Path:
    """A random model with the embedded one's tokenizer, that works like a real one and keeps little: all blocks fit."""
    import transformers

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 1}
    sizes |= {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096, "vocab_size": 49_152}
    library = cast(Any, transformers)
    library.AutoModelForCausalLM.from_config(library.LlamaConfig(**sizes)).save_pretrained(folder)
    real = materialise(SMOLLM2, cache_folder(None), progress=logging.info)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(real / name, folder / name)
    return folder


def serve(length: int) -> None:
    """Serve with a full pool of prompts of so many blocks; say where, and at the end of the input how steps went."""
    config = Config(
        model=ModelConfig(model=str(lean(Path(tempfile.mkdtemp()))), device="cpu"),
        cache=CacheConfig(kv_cache=str(BLOCKS + 512)),
        schedule=ScheduleConfig(),
        server=ServerConfig(port=0),
    )
    metrics = Metrics()
    assembly = assemble(config, observer=metrics)
    space = assembly.front.served.space

    def fill(cache: PrefixCache, number: int) -> None:
        chain = Chain(space, [number, *range(length * BLOCK - 1)])  # as ids they need not be text
        lease = cache.acquire(chain, EVERYTHING)
        cache.reserve(lease, 0, len(chain))
        cache.publish(lease, chain, len(chain))
        cache.release(lease)

    def fill_all(cache: PrefixCache) -> None:
        for number in range(BLOCKS // length):
            fill(cache, number)

    assembly.worker.on_cache(fill_all)
    listener = Listener(config.server, drain_s=1)
    thread = threading.Thread(target=listener.run, args=[create_app(serving(assembly, metrics, None))])
    thread.start()
    while not listener.started:
        time.sleep(0.01)
    begins = list[float]()
    step = Engine.step

    def noted(engine: Engine) -> Any:
        begins.append(time.perf_counter())
        return step(engine)

    with timed(PrefixCache, "look") as looks:
        cast(Any, Engine).step = noted
        print(json.dumps({"url": listener.url}), flush=True)
        for line in sys.stdin:
            if line.strip() == "report":
                gaps = sorted(b - a for a, b in pairwise(begins))
                begins.clear()
                print(json.dumps({"gaps": gaps, "look_ms": max(looks, default=0) * 1e3}), flush=True)
                looks.clear()
    listener.stop()
    thread.join(10)
    assembly.close(timeout_s=10)


def watch() -> None:
    """Look at a full pool while an answer runs, and without looking."""
    for shape, length in SHAPES.items():
        command = [sys.executable, __file__, "--serve", str(length)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]

            def report(server: Any = server) -> dict[str, Any]:
                server.stdin.write("report\n")
                server.stdin.flush()
                return json.loads(server.stdout.readline())

            with httpx.Client(base_url=url, timeout=60) as client:
                alone = [_looked(client) for _ in range(ROUNDS)]
            quiet = _beside_an_answer(url, report, lambda: time.sleep(WAITS_S / ROUNDS))
            beside = list[dict[str, float]]()
            with httpx.Client(base_url=url, timeout=60) as client:

                def look(client: httpx.Client = client, beside: list[dict[str, float]] = beside) -> None:
                    beside.append(_looked(client))
                    time.sleep(WAITS_S / ROUNDS)

                watched = _beside_an_answer(url, report, look)
            server.stdin.close()
        row: dict[str, object] = {
            f"{path} ms": [round(statistics.median(one[path] for one in times), 1) for times in (alone, beside)]
            for path in PAGE
        }
        row["steps"] = [len(quiet["gaps"]), len(watched["gaps"])]
        row["longest work between two steps ms"] = round(watched["look_ms"], 2)
        for name, share in (("median", 0.5), ("p99", 0.99), ("p99.9", 0.999)):
            row[f"from step to step {name} ms, quiet and watched"] = [
                round(_at(found["gaps"], share) * 1e3, 2) for found in (quiet, watched)
            ]
        print(json.dumps({"watch": shape, **row}), flush=True)


def _looked(client: httpx.Client) -> dict[str, float]:
    """Milliseconds of each request of the page."""
    found = dict[str, float]()
    for path in PAGE:
        start = time.perf_counter()
        client.get(path).raise_for_status()
        found[path] = (time.perf_counter() - start) * 1e3
    return found


def _beside_an_answer(url: str, report: Callable[[], dict[str, Any]], work: Callable[[], None]) -> dict[str, Any]:
    """Do the work some times while tokens are drawn; how the steps went."""
    done = threading.Event()

    def answer() -> None:
        body = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "stream": True, "cache": {"store": False}}
        while not done.is_set():
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
                for _ in stream.iter_raw(65_536):
                    if done.is_set():
                        return

    running = threading.Thread(target=answer)
    running.start()
    time.sleep(0.5)
    report()
    for _ in range(ROUNDS):
        work()
    found = report()
    done.set()
    running.join()
    return found


def _at(times: Sequence[float], share: float) -> float:
    return times[min(len(times) - 1, int(share * len(times)))]


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["explain", "watch"])
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if chosen.serve:
        serve(chosen.serve)
        return
    for name in chosen.what:
        {"explain": explain, "watch": watch}[name]()


if __name__ == "__main__":
    main()
