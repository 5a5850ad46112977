"""Why a lookup stopped where it did: exactly one reason out of a closed set."""

from typing import Literal

Reason = Literal[
    "cache_disabled",
    "model_not_cacheable",
    "read_disabled",
    "prefix_length",
    "complete",
    "too_short",
    "pending",
    "flushed",
    "expired",
    "evicted",
    "not_stored",
    "other_namespace",
    "diverged",
    "never_seen",
]
