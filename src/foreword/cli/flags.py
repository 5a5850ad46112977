"""The settings' sections as flags: as `base.config` has them, with the model in front and without a name."""

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from foreword.base.config import CacheConfig, ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags(ModelConfig):
    """What computes."""

    model: Annotated[Positional[str | None], arg(metavar="[MODEL]", help_behavior_hint="")] = None
    """A local directory or a Hugging Face hub id. Left out: the embedded SmolLM2-135M-Instruct."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFlags(CacheConfig):
    """What is kept."""

    cache: Annotated[bool, arg(help_behavior_hint="(default: prefixes are reused)")] = True
    """Compute every prompt whole."""
