"""`foreword identity`: what a model's cache entries are bound to."""

import json as json_module
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from tyro.conf import OmitArgPrefixes

from foreword.assemble import Identity as ModelIdentity
from foreword.assemble import identify
from foreword.base.config import CacheConfig, Config
from foreword.cli.flags import ModelFlags
from foreword.cli.libraries import uncollected
from foreword.cli.loading import loading


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Print everything that goes into the hash of a model's cached blocks, and that hash.

    Two processes reuse each other's blocks only if their roots are equal.
    """

    model: OmitArgPrefixes[ModelFlags] = field(default_factory=ModelFlags)
    block_size: int = 16
    """Tokens in a block; part of the root."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        """Load the model, print, and be done."""
        cache = CacheConfig(block_size=self.block_size, kv_cache="1")  # nothing is computed
        with loading(Console(stderr=True), "Reading the model", self.model.cache_dir) as tell, uncollected():
            found = identify(Config(model=self.model, cache=cache), tell)
        if self.json:
            print(json_module.dumps(_as_json(found), indent=2))
        else:
            _print(found)
        return 0


def _as_json(found: ModelIdentity) -> dict[str, object]:
    return {
        "model": found.name,
        "block_size": found.block_size,
        "ingredients": dict(sorted(found.ingredients.items())),
        "root": found.root.hex(),
        "not_cacheable": found.not_cacheable,
    }


def _print(found: ModelIdentity) -> None:
    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in sorted(found.ingredients.items()):
        table.add_row(name, value)
    table.add_section()
    table.add_row("block_size", str(found.block_size))
    table.add_row("root", found.root.hex())
    table.add_row("prefixes", "reused" if found.not_cacheable is None else f"not reused: {found.not_cacheable}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # so that hashes stay in one piece for whoever reads the output
    console.print(f"[bold]{found.name}[/]", highlight=False)
    console.print(table, highlight=False)
