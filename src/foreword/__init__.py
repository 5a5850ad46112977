"""Foreword: serve Hugging Face models and never compute the same prompt prefix twice.

>>> from foreword import LLM
>>> LLM().generate("Once upon a time", max_tokens=16)[0].text
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreword.base.errors import (
        CapacityError,
        ConfigError,
        ForewordError,
        InvariantBroken,
        ModelRefused,
        NotFound,
        RequestError,
        StepFailed,
        Unavailable,
    )
    from foreword.llm import LLM, Result

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CapacityError",
    "ConfigError",
    "ForewordError",
    "InvariantBroken",
    "ModelRefused",
    "NotFound",
    "RequestError",
    "Result",
    "StepFailed",
    "Unavailable",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for: the heart can be imported without the rooms above it."""
    if name not in __all__:
        raise AttributeError(f"module 'foreword' has no attribute {name!r}")
    home = "foreword.llm" if name in {"LLM", "Result"} else "foreword.base.errors"
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted({*globals(), *__all__})
