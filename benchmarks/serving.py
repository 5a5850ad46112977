"""Time an OpenAI-compatible server on prompts that share prefixes, from a client's side.

    python benchmarks/serving.py                          starts Foreword on the embedded model and measures it
    python benchmarks/serving.py --url URL --model NAME   measures whatever serves there

Every time is wall-clock in this process. TTFT is the time from sending a request to its first streamed piece with a
token. Only ratios taken on one machine, one server at a time on an idle one, mean anything.

    prefix    one prefix, ten questions one after the other: cold and warm TTFT, for prefixes of 150, 700, 2,800 words
    crowd     32 requests at once: four prefixes of 700 words shared by eight requests each, then 32 different ones
    turns     four users, six growing turns each, over one system prompt
    decode    seconds between tokens at batch 1 and 8
"""

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import httpx

NOUNS = (
    "river stone letter winter garden engine market doctor bridge teacher island window summer candle harbour painter"
    " village captain forest kitchen mirror railway history journey library mountain orchard picture question shadow"
).split()
VERBS = (
    "carries finds leaves paints remembers answers crosses builds follows keeps opens measures repairs writes".split()
)


@dataclass(frozen=True, slots=True)
class Timing:
    """One request, in seconds."""

    ttft_s: float
    total_s: float
    cached_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Server:
    """Where to send requests."""

    client: httpx.AsyncClient
    url: str
    model: str

    async def complete(self, prompt: str, max_tokens: int) -> Timing:
        """Stream one completion of exactly `max_tokens` tokens."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start, first, usage = time.perf_counter(), None, {}
        async with self.client.stream("POST", f"{self.url}/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                raise SystemExit(f"{reply.status_code}: {(await reply.aread()).decode()[:300]}")
            async for line in reply.aiter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                event = json.loads(line.removeprefix("data:"))
                usage = event.get("usage") or usage
                if event["choices"] and first is None:
                    first = time.perf_counter()
        end = time.perf_counter()
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Timing((first or end) - start, end - start, cached, usage.get("prompt_tokens", 0))


def text(num_words: int, seed: object) -> str:
    """English-looking words; equal seeds give equal texts."""
    dice = random.Random(str(seed))
    return " ".join(dice.choice(VERBS if i % 3 == 1 else NOUNS) for i in range(num_words))


def ms(seconds: float) -> float:
    """Milliseconds, to a tenth."""
    return round(seconds * 1e3, 1)


async def prefix(server: Server) -> dict[str, object]:
    """Cold and warm TTFT by length of the shared prefix."""
    rows: dict[str, object] = {}
    for num_words in (150, 700, 2800):
        cold, warm, last = list[float](), list[float](), None
        for repeat in range(3):
            head = text(num_words, f"{num_words}/{repeat}/{time.time_ns()}")
            for i in range(10):
                last = await server.complete(f"{head}\nQuestion {i}: {text(20, (repeat, i))}", 1)
                (warm if i else cold).append(last.ttft_s)
        assert last is not None
        rows[f"{num_words} words"] = {
            "prompt_tokens": last.prompt_tokens,
            "cached_tokens": last.cached_tokens,
            "cold_ttft_ms": ms(statistics.median(cold)),
            "warm_ttft_ms": ms(statistics.median(warm)),
            "ratio": round(statistics.median(cold) / statistics.median(warm), 2),
        }
    return rows


async def crowd(server: Server) -> dict[str, object]:
    """32 requests at once, with and without sharing."""
    rows: dict[str, object] = {}
    for shared in (True, False):
        stamp = time.time_ns()
        heads = [text(700, f"{stamp}/{i // 8 if shared else i}") for i in range(32)]
        prompts = [f"{head}\nQuestion {i}: {text(45, i)}" for i, head in enumerate(heads)]
        random.Random(1).shuffle(prompts)
        start = time.perf_counter()
        timings = await asyncio.gather(*(server.complete(prompt, 32) for prompt in prompts))
        rows["shared" if shared else "unshared"] = {
            "seconds": round(time.perf_counter() - start, 2),
            "mean_ttft_ms": ms(statistics.mean(t.ttft_s for t in timings)),
            "cached_share": round(sum(t.cached_tokens for t in timings) / sum(t.prompt_tokens for t in timings), 3),
        }
    return rows


async def turns(server: Server) -> dict[str, object]:
    """Chats that grow, all over one system prompt."""
    system, last_turn, ttfts = text(300, time.time_ns()), list[float](), list[float]()

    async def user(number: int) -> None:
        history = system
        for turn in range(6):
            history += f"\nUser {number}: {text(60, (number, turn))}\nAssistant:"
            timing = await server.complete(history, 24)
            history += " " + text(24, ("answer", number, turn))
            ttfts.append(timing.ttft_s)
            if turn == 5:
                last_turn.append(timing.ttft_s)

    start = time.perf_counter()
    await asyncio.gather(*(user(i) for i in range(4)))
    seconds = round(time.perf_counter() - start, 2)
    return {
        "seconds": seconds,
        "mean_ttft_ms": ms(statistics.mean(ttfts)),
        "last_turn_ttft_ms": ms(statistics.mean(last_turn)),
    }


async def decode(server: Server) -> dict[str, object]:
    """Time between tokens after prompts of 300 words."""
    rows: dict[str, object] = {}
    for batch in (1, 8):
        prompts = [text(300, f"{time.time_ns()}/{i}") for i in range(batch)]
        timings = await asyncio.gather(*(server.complete(prompt, 64) for prompt in prompts))
        between = statistics.median((t.total_s - t.ttft_s) / 63 for t in timings)
        rows[f"batch {batch}"] = {"ms_between_tokens": ms(between), "tokens_per_s": round(batch / between, 1)}
    return rows


CASES: dict[str, Callable[[Server], Awaitable[dict[str, object]]]] = {
    case.__name__: case for case in (prefix, crowd, turns, decode)
}


def started(arguments: list[str]) -> tuple[subprocess.Popen[bytes], str, dict[str, float]]:
    """Start Foreword on a free port; its process, its URL, and the seconds until it was ready and had answered."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start, url = time.perf_counter(), f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", "from foreword.cli import main; main()", "serve", "--port", str(port), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    with httpx.Client(timeout=60) as client:  # one for all looks: making one costs as much time as the server has
        while process.poll() is None:
            with suppress(httpx.ConnectError):
                if client.get(f"{url}/ready").status_code == 200:
                    ready_s = time.perf_counter() - start
                    client.post(f"{url}/chat", json={"prompt": "Good morning", "max_tokens": 1}).raise_for_status()
                    first_answer_s = time.perf_counter() - start
                    return process, url, {"ready_s": round(ready_s, 2), "first_answer_s": round(first_answer_s, 2)}
            time.sleep(0.02)
    raise SystemExit(f"the server ended with {process.returncode}")


async def measure(url: str, model: str | None, cases: list[str]) -> dict[str, object]:
    """Run the cases one after the other, after a short warm-up."""
    limits = httpx.Limits(max_connections=256)
    async with httpx.AsyncClient(timeout=900, limits=limits) as client:
        name = model or (await client.get(f"{url}/v1/models")).json()["data"][0]["id"]
        server = Server(client, url, name)
        await server.complete(text(40, time.time_ns()), 8)
        results: dict[str, object] = {"model": name}
        for case in cases:
            results[case] = await CASES[case](server)
            print(json.dumps({case: results[case]}), flush=True)
        return results


def main() -> None:
    """Measure and print one JSON object a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--model", help="its model's name; by default the first that it lists")
    parser.add_argument("--cases", default="prefix,crowd,turns,decode", help=", ".join(CASES))
    parser.add_argument("serve", nargs="*", help="after --: arguments of `foreword serve`")
    wish = parser.parse_args()
    cases = wish.cases.split(",")
    if wish.url:
        asyncio.run(measure(wish.url.rstrip("/"), wish.model, cases))
        return
    process, url, took = started(wish.serve)
    try:
        print(json.dumps(took), flush=True)
        asyncio.run(measure(url, wish.model, cases))
    finally:
        process.terminate()
        process.wait(30)


if __name__ == "__main__":
    main()
