"""Which verbs there are, and how arguments become one."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import tyro
from tyro.conf import DisallowNone, FlagCreatePairsOff, HelptextFromCommentsOff, subcommand

from foreword.cli.demo import Demo
from foreword.cli.explain import Explain
from foreword.cli.identity import Identity
from foreword.cli.inspect import Inspect
from foreword.cli.keys import Keys
from foreword.cli.serve import Serve

Verb = (
    Annotated[Serve, subcommand("serve", prefix_name=False)]
    | Annotated[Demo, subcommand("demo", prefix_name=False)]
    | Annotated[Identity, subcommand("identity", prefix_name=False)]
    | Annotated[Keys, subcommand("keys", prefix_name=False)]
    | Annotated[Inspect, subcommand("inspect", prefix_name=False)]
    | Annotated[Explain, subcommand("explain", prefix_name=False)]
)


def parse(arguments: Sequence[str]) -> Serve | Demo | Identity | Keys | Inspect | Explain:
    """The verb with its settings. Exits with a message for arguments that are wrong; raises ConfigError for values."""
    if list(arguments) == ["--version"]:
        print(f"foreword {version('foreword')}")
        raise SystemExit(0)
    return tyro.cli(
        Verb,
        prog="foreword",
        description="Serve Hugging Face models and never compute the same prompt prefix twice.",
        args=list(arguments),
        config=(FlagCreatePairsOff, DisallowNone, HelptextFromCommentsOff),
    )
