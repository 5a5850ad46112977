"""One LLM on the embedded model for the whole room."""

from collections.abc import Iterator

import pytest

from foreword import LLM


@pytest.fixture(scope="package")
def llm() -> Iterator[LLM]:
    with LLM(kv_cache="400", max_waiting=4, max_running=4, max_context=1024) as made:
        yield made
