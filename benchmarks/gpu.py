"""What Foreword does on one card, in under six minutes: `python benchmarks/gpu.py [--smoke] [--json FILE]`.

Random weights of Qwen3-0.6B's and Qwen3-8B's shape; nothing is downloaded. Each section is guarded and timed, and the
table comes last, whatever has failed before. `--smoke` runs every section on a CPU with a tiny model, to see that the
script itself works; its numbers mean nothing.
"""

import argparse
import gc
import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import transformers

from foreword.base.config import AttentionName, CacheConfig, ModelConfig
from foreword.base.errors import ConfigError
from foreword.base.ids import RequestId
from foreword.base.params import Sampling
from foreword.cache.identity import Chain, Space, root
from foreword.cache.prefix_cache import PrefixCache
from foreword.engine.engine import Engine
from foreword.engine.sockets import MonotonicClock, Nobody
from foreword.runner import library, loader
from foreword.runner.attention.backend import Backend, Ground
from foreword.runner.attention.call import Call, LayerFacts, Scoring, Sight
from foreword.runner.attention.choice import CANDIDATES, choose
from foreword.runner.attention.interface import attend
from foreword.runner.attention.tiles import Segment
from foreword.runner.layout import LayerShape, lay_out
from foreword.runner.memory import KVMemory
from foreword.runner.runner import ModelRunner
from foreword.schedule.request import Submission
from foreword.schedule.scheduler import Scheduler

t: Any = transformers
Row = tuple[str, float, str]
LIMIT_S = 270.0
"""No section begins later than this."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    device: str
    dtype: torch.dtype
    small: Callable[[], Any]
    large: Callable[[], Any] | None
    prompts: tuple[int, ...]
    groups: int
    each: int
    prefix: int
    mix: int
    mix_range: tuple[int, int]
    decoders: int
    shared: int
    copy_bytes: int
    square: int
    kv: str


def qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> Any:
    return t.Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=tied,
    )


def tiny() -> Any:
    return t.Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
    )


FULL = Sizes(
    device="cuda",
    dtype=torch.bfloat16,
    small=lambda: qwen3(1024, 3072, 28, 16, tied=True),
    large=lambda: qwen3(4096, 12288, 36, 32, tied=False),
    prompts=(1024, 8192, 32768),
    groups=16,
    each=16,
    prefix=4096,
    mix=256,
    mix_range=(100, 1024),
    decoders=64,
    shared=16384,
    copy_bytes=2**31,
    square=8192,
    kv="40GiB",
)
SMOKE = Sizes(
    device="cpu",
    dtype=torch.float32,
    small=tiny,
    large=tiny,
    prompts=(32, 100),
    groups=2,
    each=3,
    prefix=48,
    mix=4,
    mix_range=(5, 10),
    decoders=3,
    shared=64,
    copy_bytes=2**16,
    square=64,
    kv="400",
)


class House:
    """An engine around a model with random weights."""

    def __init__(self, config: Any, sizes: Sizes, attention: AttentionName = "auto") -> None:
        library.register_attention(attend)
        loader.ingredients = lambda *_: {"weights": "random"}  # hashing gigabytes of them would tell nothing
        torch.manual_seed(0)
        with torch.device(sizes.device), library.quiet():
            model = t.AutoModelForCausalLM.from_config(config, dtype=sizes.dtype)
        library.use_attention(model)
        loaded = loader.Loaded(name="random", directory=None, model=model.eval().requires_grad_(False))
        settings = ModelConfig(attention=attention)
        self.runner: ModelRunner = loader.equip(loaded, settings, CacheConfig(kv_cache=sizes.kv))
        self.vocabulary = int(config.vocab_size)
        self.space = Space(root(self.runner.ingredients, self.runner.block_size), self.runner.block_size)
        self._next = 0
        self.empty()

    def empty(self, *, cached: bool = True) -> None:
        """Begin with an empty cache, or with none."""
        cache = PrefixCache(self.runner.num_blocks, self.runner.block_size, off=None if cached else "cache_disabled")
        scheduler = Scheduler(cache, max_batch_tokens=8192, max_running=256)
        self.engine = Engine(scheduler, self.runner, MonotonicClock(), Nobody())

    def tokens(self, count: int, seed: int) -> list[int]:
        """Random ids."""
        source = random.Random(seed)
        return [source.randrange(5, self.vocabulary) for _ in range(count)]

    def ask(self, prompt: Sequence[int], max_tokens: int, temperature: float = 0.0) -> None:
        """Queue a request; above temperature 0 with top_p 0.9."""
        self._next += 1
        chain = Chain(self.space, prompt)
        top_p = 0.9 if temperature else 1.0
        sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=self._next)
        name = RequestId(str(self._next))
        self.engine.scheduler.add(Submission(id=name, chain=chain, sampling=sampling, arrival_s=0.0))

    def finish(self) -> tuple[float, int, int]:
        """Run until nobody waits: seconds, tokens generated, prompt tokens cached."""
        start, generated, cached = time.perf_counter(), 0, 0
        while self.engine.scheduler.busy:
            outcome = self.engine.step()
            if outcome is None or outcome.stats.num_failures:
                raise RuntimeError("a step failed; see the log above")
            generated += outcome.stats.tokens_generated
            cached += outcome.stats.prompt_tokens_cached
        return time.perf_counter() - start, generated, cached

    def decode(self, count: int, max_tokens: int, temperature: float) -> float:
        """Tokens in a second of so many requests at once, behind short prompts."""
        for i in range(count):
            self.ask(self.tokens(64, i), max_tokens, temperature)
        seconds, generated, _ = self.finish()
        return generated / seconds

    def time_one(self, prompt: Sequence[int], max_tokens: int = 1) -> float:
        """Seconds of one request alone."""
        self.ask(prompt, max_tokens)
        return self.finish()[0]


# ------------------------------------------------------------------------------------------------------- sections


def ceilings(sizes: Sizes) -> Iterator[Row]:
    """What the card can do at all."""
    source = torch.empty(sizes.copy_bytes // 2, dtype=torch.bfloat16, device=sizes.device)
    target = torch.empty_like(source)
    seconds = timed(sizes, lambda: target.copy_(source))
    yield "copy, read and written", 2 * source.nbytes / seconds / 1e9, "GB/s"
    n = sizes.square
    a, b = (torch.randn(n, n, device=sizes.device, dtype=sizes.dtype) for _ in range(2))
    seconds = timed(sizes, lambda: a @ b)
    yield f"product of {n} x {n}, {str(sizes.dtype).removeprefix('torch.')}", 2 * n**3 / seconds / 1e12, "TFLOP/s"


def correctness(sizes: Sizes) -> Iterator[Row]:
    """Every backend that can be had against float32, on fresh random inputs."""
    seed = random.SystemRandom().randrange(2**31)
    for candidate in CANDIDATES:
        for window in (None, 48):
            scene = _scene(sizes, Sight(window=window), seed)
            try:
                backend = choose(candidate.name, scene[0])
            except ConfigError as why:
                print(f"  {candidate.name}: {why}")
                break
            ours, wanted = _attend_once(backend, *scene)
            error = float((ours - wanted).abs().max() / wanted.abs().max())
            yield (
                f"{candidate.name}{'' if window is None else ', window'}: largest error (seed {seed})",
                error,
                "of max",
            )
            if not error < 0.03:
                raise RuntimeError(f"{candidate.name} is wrong by {error}")


def ttft(sizes: Sizes, house: House, name: str) -> Iterator[Row]:
    """One request at a time: the prompt is new; then it is cached, all but 24 tokens."""
    house.time_one(house.tokens(sizes.prompts[0], 999))
    for count in sizes.prompts:
        head = house.tokens(count - 24, count)
        times = [house.time_one(head + house.tokens(24, seed)) for seed in range(6)]
        warm = sorted(times[2:])[len(times[2:]) // 2]  # the second one may record a graph
        yield f"{name}, TTFT cold, {count} tokens", times[0] * 1e3, "ms"
        yield f"{name}, TTFT warm, {count} tokens", warm * 1e3, "ms"


def crowd(sizes: Sizes, house: House) -> Iterator[Row]:
    """Groups that share a prefix, with the cache and without."""
    heads = [house.tokens(sizes.prefix, group) for group in range(sizes.groups)]
    for cached in (True, False):
        house.empty(cached=cached)
        for each in range(sizes.each):
            for group, head in enumerate(heads):
                house.ask(head + house.tokens(32, 1000 * each + group), 32)
        seconds, generated, reused = house.finish()
        what = f"{sizes.groups} x {sizes.each} requests, prefix of {sizes.prefix}, {'shared' if cached else 'unshared'}"
        yield what, seconds, "s"
        yield f"{what}: tokens reused", float(reused), ""
        assert generated == sizes.groups * sizes.each * 32
    house.empty()


def offline_mix(sizes: Sizes, house: House) -> Iterator[Row]:
    """Many requests at once, inputs and outputs of uniform lengths, seed 0."""
    source = random.Random(0)
    house.empty()
    for i in range(sizes.mix):
        house.ask(house.tokens(source.randint(*sizes.mix_range), i), source.randint(*sizes.mix_range))
    seconds, generated, _ = house.finish()
    yield f"offline mix of {sizes.mix} requests: output", generated / seconds, "tok/s"


def shared_decode(sizes: Sizes, house: House) -> Iterator[Row]:
    """Sequences that decode over one long prefix, attending to it together and one by one."""
    backend: Any = house.runner._backend  # noqa: SLF001  no setting turns sharing off
    least = getattr(backend, "least_saved", None)
    speeds: list[float] = []
    for together in (True, False) if least is not None else (False,):
        if least is not None:
            backend.least_saved = least if together else 2**60
        house.empty()
        head = house.tokens(sizes.shared, 5)
        house.time_one(head)
        for i in range(sizes.decoders):
            house.ask(head + house.tokens(8, i), 9)
        house.finish()  # records what it needs
        for i in range(sizes.decoders):
            house.ask(head + house.tokens(8, i), 65)
        seconds, generated, _ = house.finish()
        speeds.append(generated / seconds)
        how = "together" if together else "one by one"
        yield f"{sizes.decoders} decode over {sizes.shared} shared tokens, {how}", speeds[-1], "tok/s"
    if least is not None:
        backend.least_saved = least
        yield "  together / one by one", speeds[0] / speeds[1], "x"


def overlap(sizes: Sizes, house: House) -> Iterator[Row]:
    """Decodes where the next step is planned and launched while one is computed, and where it is not."""
    depth = house.runner.depth
    for temperature in (0.0, 0.8):
        speeds: list[float] = []
        for house.runner.depth in (2, 1):
            house.empty()
            house.decode(sizes.decoders, 9, temperature)  # records what it needs
            speeds.append(house.decode(sizes.decoders, 65, temperature))
            what = f"{sizes.decoders} decode at temperature {temperature}, {house.runner.depth} under way"
            yield what, speeds[-1], "tok/s"
        yield "  two under way / one", speeds[0] / speeds[1], "x"
    house.runner.depth = depth


def decode_bandwidth(sizes: Sizes) -> Iterator[Row]:
    """Attention of one layer for decodes of their own contexts: bytes of KV read in a second."""
    length = sizes.shared // 2
    ground, segments, call = _scene(sizes, Sight(), 0, ((length - 1, 1),) * sizes.decoders, heads=(16, 8))
    backend = choose("auto", ground)
    step = backend.begin(segments, sizes.decoders)
    seconds = timed(sizes, lambda: step.attend(call))
    shape = ground.facts[0].shape
    read = sizes.decoders * length * shape.width * call.key.element_size()
    yield f"{backend.name}: decode attention, {sizes.decoders} x {length} keys", read / seconds / 1e9, "GB/s"
    count = min(sizes.prefix, 4096)
    ground, segments, call = _scene(sizes, Sight(), 0, ((0, count),) * 4, heads=(16, 8))
    backend = choose("auto", ground)
    step = backend.begin(segments, 4 * count)
    seconds = timed(sizes, lambda: step.attend(call))
    flops = 4 * 16 * 2 * shape.width // shape.kv_heads * count * (count + 1) // 2
    yield f"{backend.name}: prefill attention, 4 x {count}", flops / seconds / 1e12, "TFLOP/s"


# ------------------------------------------------------------------------------------------------------- machinery

Scene = tuple[Ground, tuple[Segment, ...], Call]


def _scene(
    sizes: Sizes,
    sight: Sight,
    seed: int,
    chunks: tuple[tuple[int, int], ...] = ((300, 1), (37, 1), (0, 1), (0, 77), (150, 24)),
    heads: tuple[int, int] = (8, 2),
) -> Scene:
    """One layer over random keys and values, and one call."""
    torch.manual_seed(seed)
    small = sizes.device == "cpu"
    shape = LayerShape(kv_heads=heads[1], key_dim=16 if small else 128, value_dim=16 if small else 128)
    scoring = Scoring(shape.key_dim**-0.5)
    fact = LayerFacts(layer=0, heads=heads[0], shape=shape, sight=sight, scoring=scoring)
    block = 16
    need = [-(-(start + count) // block) for start, count in chunks]
    device = torch.device(sizes.device)
    memory = KVMemory(lay_out((shape,), block), sum(need), sizes.dtype, device)
    memory.buffer[:-1].normal_()
    order = torch.randperm(sum(need)).tolist()
    segments: list[Segment] = []
    row = 0
    for (start, count), num in zip(chunks, need, strict=True):
        segments.append(Segment(row, start, count, tuple(order[:num])))
        order, row = order[num:], row + count

    def states(num: int) -> torch.Tensor:
        return torch.randn(row, num, shape.key_dim, device=device, dtype=sizes.dtype).transpose(0, 1)

    call = Call(0, states(heads[0]), states(heads[1]), states(heads[1]), scoring, sight)
    return Ground(facts=(fact,), memory=memory), tuple(segments), call


def _attend_once(
    backend: Backend, ground: Ground, segments: tuple[Segment, ...], call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a backend makes of a scene, and what it should be."""
    total = call.query.shape[1]
    ours = backend.begin(segments, total).attend(call).float()
    wanted = torch.zeros_like(ours)
    group = call.query.shape[0] // call.key.shape[0]
    for segment in segments:
        end = segment.start + segment.count
        blocks = list(segment.blocks)
        keys, values = (
            states[blocks].flatten(0, 1)[:end].float().repeat_interleave(group, 1)
            for states in (ground.memory.keys(0), ground.memory.values(0))
        )
        rows = slice(segment.row, segment.row + segment.count)
        scores = torch.einsum("hqd,khd->hqk", call.query[:, rows].float(), keys) * call.scoring.scaling
        seen = call.sight.visible(torch.arange(segment.start, end), torch.arange(end)).to(scores.device)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        wanted[rows] = torch.einsum("hqk,khd->qhd", weights, values)
    return ours, wanted


def timed(sizes: Sizes, work: Callable[[], object], repeats: int = 20) -> float:
    """Seconds of one call, the fastest of some."""
    best = float("inf")
    for _ in range(3 if sizes.device == "cpu" else repeats):
        synchronise(sizes)
        start = time.perf_counter()
        work()
        synchronise(sizes)
        best = min(best, time.perf_counter() - start)
    return best


def synchronise(sizes: Sizes) -> None:
    if sizes.device == "cuda":
        torch.cuda.synchronize()


class Report:
    """All rows, and the sections that failed or were left out."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.rows: list[Row] = []
        self.failed: list[str] = []

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Guard and time what is done inside."""
        start = time.perf_counter()
        print(f"{name} ...", flush=True)
        try:
            yield
        except Exception:  # noqa: BLE001  whatever it is, the table comes
            traceback.print_exc()
            self.failed.append(name)
        print(f"  {time.perf_counter() - start:.1f} s", flush=True)

    def add(self, name: str, rows: Callable[[], Iterator[Row]]) -> None:
        """Run a section if there is time."""
        if time.perf_counter() - self.start > LIMIT_S:
            self.failed.append(f"{name} (no time left)")
            return
        with self.section(name):
            for row in rows():
                print(f"  {row[0]}: {row[1]:.4g} {row[2]}", flush=True)
                self.rows.append(row)

    def table(self) -> str:
        """All rows, aligned, and what failed."""
        width = max((len(name) for name, _, _ in self.rows), default=10)
        lines = [f"| {name:<{width}} | {value:12,.4g} {unit:<8} |" for name, value, unit in self.rows]
        ends = [f"| {'seconds in all':<{width}} | {time.perf_counter() - self.start:12,.4g} {'s':<8} |"]
        return "\n".join([*lines, *ends, *(f"FAILED: {name}" for name in self.failed)])


def run(sizes: Sizes) -> Report:
    """All sections."""
    report = Report()
    report.add("ceilings", lambda: ceilings(sizes))
    report.add("correctness", lambda: correctness(sizes))
    report.add("attention", lambda: decode_bandwidth(sizes))
    house: House | None = None
    with report.section("a model of 0.6B"):
        house = House(sizes.small(), sizes)
        print(f"  attention {house.runner.card.attention}, {house.runner.num_blocks} blocks")
    if house is not None:
        small = house
        report.add("time to first token, 0.6B", lambda: ttft(sizes, small, "0.6B"))
        report.add("offline mix, 0.6B", lambda: offline_mix(sizes, small))
        report.add("shared-prefix decode, 0.6B", lambda: shared_decode(sizes, small))
        report.add("two steps under way, 0.6B", lambda: overlap(sizes, small))
        report.add("a crowd, 0.6B", lambda: crowd(sizes, small))
        del small
    house = None
    gc.collect()
    if sizes.device == "cuda":
        torch.cuda.empty_cache()
    if sizes.large is not None and time.perf_counter() - report.start < LIMIT_S:
        with report.section("a model of 8B"):
            house = House(sizes.large(), replace(sizes, large=None))
        if house is not None:
            large = house
            report.add("time to first token, 8B", lambda: ttft(sizes, large, "8B"))
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU: does the script work?")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    arguments = parser.parse_args()
    if not arguments.smoke and not torch.cuda.is_available():
        print("torch finds no card; --smoke runs every section on a CPU, for nothing but to see that it runs")
        return 2
    card = "a CPU (smoke)" if arguments.smoke else torch.cuda.get_device_name()
    print(f"{card}; torch {torch.__version__}, transformers {t.__version__}")
    with torch.inference_mode():
        report = run(SMOKE if arguments.smoke else FULL)
    print(report.table())
    if arguments.json:
        arguments.json.write_text(json.dumps({"card": card, "rows": report.rows, "failed": report.failed}, indent=1))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
