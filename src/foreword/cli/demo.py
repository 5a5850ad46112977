"""`foreword demo`: the same long prefix with different questions, and what the cache makes of it."""

import json as json_module
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter

from rich.console import Console
from rich.table import Table
from tyro.conf import OmitArgPrefixes

from foreword.assemble import Assembly, assemble
from foreword.base.config import Config, ScheduleConfig
from foreword.base.errors import ConfigError, StepFailed
from foreword.cli.flags import CacheFlags, ModelFlags
from foreword.cli.libraries import uncollected
from foreword.cli.loading import loading
from foreword.front.ask import Ask
from foreword.front.front import Front

_PREFIX = """\
You answer questions about the lighthouse of Skarvnes. The facts follow. The tower was built in 1874 from granite that
came by boat from the mainland, and its light was first lit on the ninth of October of that year. It stands forty-one
metres above the sea and can be seen for nineteen nautical miles in clear weather. The first keeper, Ingrid Solheim,
kept a diary for thirty-three years; it records 212 storms, eleven wrecks and one birth. In 1931 the oil lamp was
replaced by an electric one, and in 1986 the last keeper left and the light became automatic. Since then the keeper's
house has been a weather station and, in summer, a small museum with a room for guests. The path from the harbour takes
forty minutes and is closed when the wind is above twenty metres a second. Visitors bring their own water, since the
well is salt.
"""
_QUESTIONS = (
    "When was the tower built?",
    "Who was the first keeper?",
    "How far can the light be seen?",
    "How many storms does the diary record?",
    "When did the last keeper leave?",
    "Where did the granite come from?",
    "How long is the walk from the harbour?",
    "When is the path closed?",
    "What is the keeper's house used for now?",
    "Why do visitors bring their own water?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Send prompts that share one long prefix, one after the other, and show what the cache saves on this machine."""

    model: OmitArgPrefixes[ModelFlags] = field(default_factory=ModelFlags)
    cache: OmitArgPrefixes[CacheFlags] = field(default_factory=CacheFlags)
    schedule: OmitArgPrefixes[ScheduleConfig] = field(default_factory=ScheduleConfig)
    prefix_tokens: int = 1000
    """Tokens in the prefix that all prompts share."""
    requests: int = 10
    """Prompts to send; the first one finds nothing cached."""
    max_tokens: int = 8
    """Tokens to generate for each."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        """Load the model, send, print."""
        for name, least in (("prefix_tokens", 1), ("requests", 2), ("max_tokens", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        progress = Console(stderr=True)
        with loading(progress, "Loading the model", self.model.cache_dir) as tell:
            with uncollected():
                assembly = assemble(Config(model=self.model, cache=self.cache, schedule=self.schedule), tell)
            tell(f"Sending {self.requests} requests over one prefix of {self.prefix_tokens} tokens")
            report = _experiment(assembly, self)
        assembly.close()
        if self.json:
            print(json_module.dumps(asdict(report), indent=2))
        else:
            _print(report)
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request of the experiment."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    ttft_s: float
    """From arrival to the first token, on the engine's clock."""
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The experiment in numbers."""

    model: str
    device: str
    dtype: str
    prefix_tokens: int
    suffix_tokens: float
    """Mean over the prompts."""
    requests: tuple[Sent, ...]
    cold_ttft_s: float
    """The first request's."""
    warm_ttft_s: float
    """The median of the others."""
    hit_rate: float
    """Cached prompt tokens over all prompt tokens."""
    prefill_flops: int
    """What all prompts would take without a cache."""
    prefill_flops_saved: int
    speedup: float
    """Measured: cold over warm."""
    speedup_linear: float
    """(P + S) / S: what it would be if a prompt cost by the token."""
    speedup_quadratic: float
    """((P + S) / S)^2: what it would be if a prompt cost by the pair of tokens."""


def _experiment(assembly: Assembly, wish: Demo) -> Report:
    front = assembly.front
    prefix = _prefix(front, wish.prefix_tokens)
    suffixes = [front.tokenizer.encode(_question(i), add_special_tokens=False) for i in range(wish.requests)]
    # The first forward pass of a process, and the first of a size, are slow for reasons of their own; that must be
    # nobody's cold start.
    for suffix in suffixes[:2]:
        _send(front, prefix + tuple(suffix), wish.max_tokens)
    assembly.worker.flush()
    sent = tuple(_send(front, prefix + tuple(suffix), wish.max_tokens) for suffix in suffixes)
    cold, warm = sent[0].ttft_s, median(one.ttft_s for one in sent[1:])
    suffix_tokens = sum(map(len, suffixes)) / len(suffixes)
    growth = (len(prefix) + suffix_tokens) / suffix_tokens
    prompt_tokens = sum(one.prompt_tokens for one in sent)
    return Report(
        model=assembly.card.name,
        device=assembly.card.device,
        dtype=assembly.card.dtype,
        prefix_tokens=len(prefix),
        suffix_tokens=suffix_tokens,
        requests=sent,
        cold_ttft_s=cold,
        warm_ttft_s=warm,
        hit_rate=sum(one.cached_tokens for one in sent) / prompt_tokens,
        prefill_flops=sum(assembly.prefill_flops(one.prompt_tokens) for one in sent),
        prefill_flops_saved=sum(assembly.prefill_flops(one.cached_tokens) for one in sent),
        speedup=cold / warm,
        speedup_linear=growth,
        speedup_quadratic=growth**2,
    )


def _prefix(front: Front, num_tokens: int) -> tuple[int, ...]:
    """Real text, repeated under numbered headings up to exactly this many tokens."""
    ids: list[int] = front.tokenizer.encode("")
    part = 0
    while len(ids) < num_tokens:
        part += 1
        ids += front.tokenizer.encode(f"Part {part}. {_PREFIX}", add_special_tokens=False)
    return tuple(ids[:num_tokens])


def _question(number: int) -> str:
    again, which = divmod(number, len(_QUESTIONS))
    return f"\n\nQuestion{f' {again + 1}' if again else ''}: {_QUESTIONS[which]}\nAnswer:"


def _send(front: Front, prompt: Sequence[int], max_tokens: int) -> Sent:
    start = perf_counter()
    last = list(front.submit(Ask(prompt=tuple(prompt), max_tokens=max_tokens, ignore_eos=True)))[-1]
    if last.finish == "error" or last.usage is None:
        raise StepFailed(last.error or "a request of the demo failed")
    usage = last.usage
    return Sent(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        computed_tokens=usage.computed_tokens,
        completion_tokens=usage.completion_tokens,
        ttft_s=usage.first_token_s,
        total_s=perf_counter() - start,
    )


def _print(report: Report) -> None:
    console = Console()
    where = f"[bold]{report.model}[/] on {report.device}, {report.dtype}"
    console.print(f"{where}: one prefix of {report.prefix_tokens:,} tokens", highlight=False)
    table = Table("request", "prompt", "cached", "computed", "TTFT", "total")
    for column in table.columns:
        column.justify = "right"
    for i, one in enumerate(report.requests, start=1):
        numbers = (one.prompt_tokens, one.cached_tokens, one.computed_tokens)
        times = (f"{1000 * one.ttft_s:,.0f} ms", f"{1000 * one.total_s:,.0f} ms")
        table.add_row(
            str(i), *(f"{number:,}" for number in numbers), *times, style="dim" if not one.cached_tokens else ""
        )
    console.print(table)
    cold, warm = 1000 * report.cold_ttft_s, 1000 * report.warm_ttft_s
    saved = report.prefill_flops_saved / report.prefill_flops
    lines = (
        ("time to first token", f"cold {cold:,.0f} ms, warm {warm:,.0f} ms (median): {report.speedup:.1f}x faster"),
        ("if prompts cost by the token", f"(P+S)/S = {report.speedup_linear:.1f}x"),
        ("if by the pair of tokens", f"((P+S)/S)^2 = {report.speedup_quadratic:,.0f}x"),
        ("hit rate", f"{report.hit_rate:.1%} of all prompt tokens"),
        (
            "prefill saved",
            f"{report.prefill_flops_saved / 1e9:,.0f} of {report.prefill_flops / 1e9:,.0f} GFLOP ({saved:.1%})",
        ),
    )
    grid = Table.grid(padding=(0, 2))
    for name, value in lines:
        grid.add_row(name, value)
    console.print(grid, highlight=False)
    console.print(f"P = {report.prefix_tokens:,} prefix tokens, S = {report.suffix_tokens:.1f} on average", style="dim")
