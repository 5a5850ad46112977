"""Which backend computes attention: one table, best first.

A new backend is one file with a way to make it and a way to say why it cannot be used here, and one line below; its
name goes into `base.config.AttentionName`.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from foreword.base.errors import ConfigError
from foreword.runner.attention import flash_attn, flashinfer, llvm, sdpa, triton, varlen
from foreword.runner.attention.backend import Backend, Ground

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend that may be chosen."""

    name: str
    """As in `--attention`."""
    obstacle: Callable[[Ground], str | None]
    """Why it cannot be used with this model on this machine; None where it can."""
    make: Callable[[Ground], Backend]


CANDIDATES: tuple[Candidate, ...] = (
    Candidate("triton", triton.obstacle, triton.make),
    Candidate("varlen", varlen.obstacle, varlen.make),
    Candidate("flashinfer", flashinfer.obstacle, flashinfer.make),
    Candidate("flash-attn", flash_attn.obstacle, flash_attn.make),
    Candidate("llvm", llvm.obstacle, llvm.make),
    Candidate("sdpa", sdpa.obstacle, sdpa.make),
)
"""Best first: `auto` takes the first that meets no obstacle."""


def choose(wanted: str, ground: Ground, candidates: tuple[Candidate, ...] = CANDIDATES) -> Backend:
    """Make the backend that `--attention` names; for "auto" the best one there is. Says in the log which and why.

    Raises ConfigError when it cannot be used here, with what can.
    """
    passed_over: list[str] = []
    for candidate in candidates:
        if wanted not in ("auto", candidate.name):
            continue
        why = candidate.obstacle(ground)
        if why is None:
            _log.info("attention: %s%s", candidate.name, f" ({'; '.join(passed_over)})" if passed_over else "")
            return candidate.make(ground)
        passed_over.append(f"not {candidate.name}: {why}")
    others = " or ".join(("auto", *_possible(ground, candidates)))
    why = passed_over[0] if passed_over else "there is no such backend"
    raise ConfigError(f"attention is {wanted}, which cannot be used here ({why}); use --attention {others}")


def _possible(ground: Ground, candidates: tuple[Candidate, ...]) -> Iterator[str]:
    return (candidate.name for candidate in candidates if candidate.obstacle(ground) is None)
