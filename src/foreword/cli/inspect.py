"""`foreword inspect`: a running server's cache at a glance, in the terminal."""

from collections.abc import Mapping
from dataclasses import dataclass
from time import sleep
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from foreword.base.errors import ConfigError

if TYPE_CHECKING:
    from foreword.cli.remote import Remote

_NUM_REQUESTS = 12
_NUM_PREFIXES = 6
_NUM_ADVICE = 5
_PREFIX_CHARS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Show what a server's cache is doing, again and again until Ctrl-C.

    Hit rate and what it saved, the pool, tenants, why matches ended, the requests under way, the prefixes hit most, and
    advice. On a server with keys an admin key shows all, another one its own tenant.
    """

    url: Positional[str] = "http://127.0.0.1:8000"
    """Where the server listens."""
    api_key: str | None = None
    """A key of --api-keys. Left out: $FOREWORD_API_KEY, if that is set."""
    every: float = 2.0
    """Seconds between two looks."""
    once: bool = False
    """Look once and end, for pipes."""

    def run(self) -> int:
        """Look."""
        from foreword.cli.remote import Remote

        if not self.every >= 0.1:
            raise ConfigError(f"every is {self.every}; at least 0.1 seconds lie between two looks")
        remote = Remote(self.url, self.api_key)
        console = Console()
        if self.once:
            console.print(_page(remote), highlight=False)
            return 0
        with Live(_page(remote), console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                sleep(self.every)
                live.update(_page(remote), refresh=True)


def _page(remote: "Remote") -> RenderableType:
    state = remote.get("/v1/cache")
    whole = "totals" in state
    parts: list[RenderableType] = [_head(remote, state), _whole(state) if whole else _own(state)]
    if state.get("tenants"):
        parts.append(_tenants(state["tenants"]))
    if whole:
        parts.append(_reasons(state["totals"]["reasons"]))
    parts += [
        _requests(remote.get(f"/v1/cache/requests?limit={_NUM_REQUESTS}")),
        _prefixes(remote.get(f"/v1/cache/tree?order=hits&limit={_NUM_PREFIXES}")),
        _advice(remote.get("/v1/cache/advice")["advice"]),
    ]
    return Group(*parts)


def _head(remote: "Remote", state: Mapping[str, Any]) -> RenderableType:
    cache = "[green]on[/]" if state["enabled"] else "[red]off[/]"
    why = "" if state["not_cacheable"] is None else f" ({state['not_cacheable']})"
    return Text.from_markup(f"[bold]{state['model']}[/] at {remote.url}, cache {cache}") + Text(why)


def _whole(state: Mapping[str, Any]) -> Table:
    totals, blocks, waiting = state["totals"], state["blocks"], state["requests"]
    ttft = totals["ttft"]
    cold, warm = _mean(ttft["miss"]), _mean(ttft["partial"], ttft["full"])
    table = _table("Since the start", "", "")
    table.add_row("prompt tokens cached", _rate(totals["prompt_tokens"]))
    table.add_row("saved", f"{totals['saved_seconds']:,.1f} s of prefill")
    table.add_row("time to first token, cold / warm", f"{cold} / {warm}")
    table.add_row(
        "blocks",
        f"{blocks['held']:,} held, {blocks['cached']:,} cached, {blocks['free']:,} free of {blocks['capacity']:,};"
        f" {blocks['pinned']:,} pinned",
    )
    table.add_row("requests", f"{waiting['running']} running, {waiting['waiting']} waiting")
    return table


def _own(state: Mapping[str, Any]) -> Table:
    blocks, waiting = state["blocks"], state["requests"]
    table = _table(f"Tenant {state['tenant']}, since the start", "", "")
    table.add_row("prompt tokens cached", _rate(state["prompt_tokens"]))
    table.add_row(
        "blocks", f"{blocks['held']:,} held, {blocks['cached']:,} cached; {blocks['share']:,} are sure to be there"
    )
    table.add_row("requests", f"{waiting['running']} running, {waiting['waiting']} waiting, {waiting['limit']} at most")
    return table


def _tenants(tenants: list[dict[str, Any]]) -> Table:
    table = _table("Tenants", "tenant", "prompt tokens cached", "share", "cached", "held", "running", "waiting")
    for one in tenants:
        blocks, requests = one["blocks"], one["requests"]
        numbers = (blocks["share"], blocks["cached"], blocks["held"], requests["running"], requests["waiting"])
        table.add_row(Text(one["tenant"]), _rate(one["prompt_tokens"]), *(f"{number:,}" for number in numbers))
    return table


def _reasons(reasons: Mapping[str, Mapping[str, int]]) -> RenderableType:
    if not any(total["requests"] for total in reasons.values()):
        return Text("No request has been answered yet.", style="dim")
    table = _table("Why matches ended", "reason", "requests", "tokens computed")
    for name, total in sorted(reasons.items(), key=lambda item: -item[1]["tokens"]):
        if total["requests"]:
            table.add_row(name, f"{total['requests']:,}", f"{total['tokens']:,}")
    return table


def _requests(listed: Mapping[str, Any]) -> RenderableType:
    if not listed["requests"]:
        return Text("No requests are under way.", style="dim")
    more = listed["total"] - len(listed["requests"])
    title = "Requests under way" + (f" (and {more} more)" if more else "")
    table = _table(title, "id", "tenant", "phase", "prompt", "cached", "computed", "answer", "age")
    for one in listed["requests"]:
        names = ("prompt_tokens", "cached_tokens", "computed_tokens", "completion_tokens")
        numbers = (f"{one[name]:,}" for name in names)
        table.add_row(one["id"][:8], Text(one["tenant"]), one["phase"], *numbers, f"{one['age_s']:.1f} s")
    return table


def _prefixes(tree: Mapping[str, Any]) -> RenderableType:
    if not tree["nodes"]:
        return Text("Nothing is cached.", style="dim")
    table = _table("Prefixes hit most", "hits", "tokens", "used", "tenant", "begins")
    for node in tree["nodes"]:
        hits = "" if node["hits"] is None else f"{node['hits']:,}"
        used = "" if node["idle_s"] is None else f"{node['idle_s']:,.0f} s ago"
        begins = " ".join(node["text"].split())[:_PREFIX_CHARS]
        table.add_row(hits, f"{node['tokens']:,}", used, Text(node["owner"]), Text(begins))
    return table


def _advice(advice: list[dict[str, Any]]) -> RenderableType:
    if not advice:
        return Text("No advice: no prompts keep parting at the same place.", style="dim")
    shown = advice[:_NUM_ADVICE]
    lines = (Text(f"{one['tenant']}: {one['text']}" if one["tenant"] else one["text"]) for one in shown)
    return Group(Text("Advice", style="bold yellow"), *lines)


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", title_style="bold", show_header=any(columns))


def _rate(tokens: Mapping[str, int]) -> str:
    total = tokens["cached"] + tokens["computed"]
    return f"{tokens['cached']:,} of {total:,}" + (f" = {tokens['cached'] / total:.1%}" if total else "")


def _mean(*totals: Mapping[str, float]) -> str:
    seconds, requests = (sum(total[what] for total in totals) for what in ("seconds", "requests"))
    return f"{1000 * seconds / requests:,.0f} ms" if requests else "none yet"
