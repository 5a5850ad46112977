"""Can one tenant learn another's prompt by the time to the first token?

    python benchmarks/side_channel.py               200 tries an arm, about three minutes; starts its own server
    python benchmarks/side_channel.py --tries 50

Each try: the victim sends a prompt that nobody sent before. Then, in random order,

    guess     the attacker sends the same prompt with another last token
    random    the attacker sends a prompt of as many tokens that nobody ever sent
    own       the victim sends its prompt again, with another last token

AUC is the chance that a time of one arm is longer than a time of another: 0.5 tells the two apart not at all, 0 or 1
always. Between the attacker's arms it has to be near 0.5, and between `own` and `random` near 0: or the prompts were
too short, or the machine too busy, to tell anything, and the first number proves nothing. The exit status says whether
both hold.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from foreword.assemble import assemble
from foreword.base.config import CacheConfig, Config, ServerConfig
from foreword.server import KeyFile, Listener, create_app, serving
from foreword.server.auth import change_keys, new_key
from foreword.telemetry import Metrics

ARMS = ("guess", "random", "own")


@dataclass(frozen=True, slots=True)
class Sent:
    """One request of an arm."""

    ttft_s: float
    cached_tokens: int
    computed_tokens: int


@contextmanager
def two_tenants() -> Iterator[tuple[str, str, str]]:
    """A server on the embedded model: its URL, the victim's key and the attacker's."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.json"
        secrets: list[str] = []
        for tenant in ("victim", "attacker"):
            secret, key = new_key(tenant, admin=False)
            change_keys(file, lambda keys, key=key: keys.with_key(key, None, None))
            secrets.append(secret)
        keys, metrics = KeyFile(file), Metrics()
        config = Config(cache=CacheConfig(kv_cache="2048"), server=ServerConfig(port=0))
        assembly = assemble(config, observer=metrics, shares=keys.keys.shares())
        listener = Listener(config.server)
        thread = threading.Thread(target=listener.run, args=[create_app(serving(assembly, metrics, keys))])
        thread.start()
        try:
            yield listener.url, secrets[0], secrets[1]
        finally:
            listener.stop()
            thread.join()
            assembly.close()


def send(client: httpx.Client, key: str, prompt: list[int]) -> Sent:
    """Stream one token; the time to it as the client sees it."""
    body = {"prompt": prompt, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    first, usage = None, {}
    start = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - start
                usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Sent(first or 0.0, cached, usage["prompt_tokens"] - cached)


def auc(ones: Sequence[float], others: Sequence[float]) -> float:
    """The chance that one of `ones` is longer than one of `others`; ties count half."""
    ranked = sorted(others)
    wins = sum((bisect_left(ranked, one) + bisect_right(ranked, one)) / 2 for one in ones)
    return wins / (len(ones) * len(others))


def measure(tries: int, num_tokens: int) -> dict[str, list[Sent]]:
    """All arms, try by try."""
    found: dict[str, list[Sent]] = {arm: [] for arm in ARMS}
    draw = random.Random(5)
    firsts = iter(range(1000, 40_000))  # no two prompts begin alike, or the attacker would find its own ones

    def prompt() -> list[int]:
        return [next(firsts), *draw.choices(range(1000, 40_000), k=num_tokens - 2)]

    with two_tenants() as (url, victim, attacker), httpx.Client(base_url=url, timeout=60) as client:
        for number in range(-3, tries):  # the first ones warm the process up and do not count
            secret = prompt()
            send(client, victim, [*secret, 500])
            prompts = {"guess": [*secret, 600], "random": [*prompt(), 600], "own": [*secret, 600]}
            for arm in draw.sample(ARMS, 3):
                sent = send(client, victim if arm == "own" else attacker, prompts[arm])
                if number >= 0:
                    found[arm].append(sent)
    return found


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=160)
    wish = parser.parse_args()
    found = measure(wish.tries, wish.tokens)
    for arm, all_sent in found.items():
        median = statistics.median(sent.ttft_s for sent in all_sent)
        cached = statistics.mean(sent.cached_tokens for sent in all_sent)
        computed = statistics.mean(sent.computed_tokens for sent in all_sent)
        print(f"{arm:8} TTFT {1000 * median:6.1f} ms (median)   cached {cached:6.1f}   computed {computed:6.1f} (mean)")
    times = {arm: [sent.ttft_s for sent in all_sent] for arm, all_sent in found.items()}
    leak, control = auc(times["guess"], times["random"]), auc(times["own"], times["random"])
    print(f"AUC guess against random {leak:.3f} (0.4 to 0.6 is wanted), own against random {control:.3f} (below 0.1)")
    guessed, drawn = (sorted({sent.computed_tokens for sent in found[arm]}) for arm in ("guess", "random"))
    if guessed != drawn:
        print(f"the attacker's requests computed {guessed} tokens for a guess and {drawn} for a random prompt")
    return 0 if abs(leak - 0.5) < 0.1 and control < 0.1 and guessed == drawn else 1


if __name__ == "__main__":
    sys.exit(main())
