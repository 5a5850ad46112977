"""The file of public heads: prompts that an operator lets all tenants share, read once at start."""

from collections.abc import Sequence
from pathlib import Path

from foreword.base.errors import ConfigError, RequestError
from foreword.front.operator import Head, Operator
from foreword.server.admin import PublicHeadRequest
from foreword.server.lists import read_list


def read_heads(path: str | Path) -> tuple[Head, ...]:
    """The heads in a file: the same objects as `POST /v1/cache/public` takes, in a list. Raises ConfigError."""
    forms = read_list(path, PublicHeadRequest, "public_heads")
    if any(form.remove for form in forms):
        raise ConfigError(f"public_heads: {path}: there is nothing to remove at the start")
    try:
        return tuple(form.head() for form in forms)
    except RequestError as error:
        raise ConfigError(f"public_heads: {path}: {error.message}") from None


def mark_heads(operator: Operator, heads: Sequence[Head]) -> None:
    """Let all tenants share these. Raises ConfigError naming the one that cannot be shared."""
    for place, head in enumerate(heads):
        try:
            operator.mark(head)
        except RequestError as error:
            raise ConfigError(f"public_heads: head {place}: {error.message}") from None
