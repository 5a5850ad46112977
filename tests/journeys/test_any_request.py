"""Requests made from our own description of the API, right ones and wrong ones: none meets a fault of the server's.

Whatever comes back is one of the statuses, media types and shapes that the description promises. Not asked for: that
whatever fits the description is taken. It cannot say how long a context is, nor which tenants there are.
"""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from foreword.base.config import CacheConfig, ScheduleConfig
from foreword.runner.embedded import SMOLLM2, materialise
from foreword.runner.shelf import cache_folder
from tests.journeys.conftest import Running, running
from tests.runner import models

NUM_EXAMPLES = 12
"""Of each route, each way."""
JSON = "application/json"
GENERATING = {f"POST {path}" for path in ("/v1/chat/completions", "/v1/completions", "/chat")}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A random model with the embedded model's tokenizer and template: real text, and answers that take no time."""
    folder = tmp_path_factory.mktemp("tiny")
    sizes = {**models.SIZES, "vocab_size": 49152, "tie_word_embeddings": True}
    model: Any = models.build(models.t.LlamaConfig(**sizes))
    model.save_pretrained(folder)
    real = materialise(SMOLLM2, cache_folder(None), progress=lambda text: None)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(real / name, folder / name)
    with running(CacheConfig(kv_cache="16"), ScheduleConfig(max_context=96), model=str(folder)) as server:
        yield server


def statuses(operation: APIOperation, mode: GenerationMode) -> set[int]:
    """What a route answers to requests that are made to fit its description, or not to."""
    seen: set[int] = set()

    @settings(
        max_examples=NUM_EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Case) -> None:
        response = case.call(timeout=60)
        seen.add(response.status_code)
        assert response.status_code < 500, (case.as_curl_command(), response.text)
        case.validate_response(response, excluded_checks=[positive_data_acceptance])

    check()
    return seen


def test_requests_that_fit_the_description(tiny: Running) -> None:
    seen = {operation.label: statuses(operation, GenerationMode.POSITIVE) for operation in operations(tiny)}
    tiny.drained()
    served = {label for label, codes in seen.items() if 200 in codes}
    assert len(seen) >= 18
    assert GENERATING | {"GET /v1/cache/tree", "POST /v1/cache/lookup", "POST /v1/cache/warm"} <= served
    assert {"GET /", "GET /metrics", "POST /v1/models/reload"} <= served


def test_requests_that_do_not(tiny: Running) -> None:
    closed = [operation for operation in operations(tiny) if operation.body or operation.query]
    seen = {operation.label: statuses(operation, GenerationMode.NEGATIVE) for operation in closed}
    tiny.drained()
    assert GENERATING | {"GET /v1/cache", "POST /v1/cache/pin", "POST /v1/cache/lookup"} <= set(seen)
    assert {label for label, codes in seen.items() if 200 in codes} <= {"POST /v1/cache/flush"}  # its body may be empty


def test_streams_are_as_described(tiny: Running) -> None:
    bodies = {
        "POST /v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
        "POST /v1/completions": {"prompt": "Hello"},
    }
    streaming = {operation.label: operation for operation in operations(tiny) if operation.label in bodies}
    for label, body in bodies.items():
        model = tiny.get("/v1/models").json()["data"][0]["id"]
        case: Any = streaming[label].Case(
            body={**body, "model": model, "max_tokens": 3, "stream": True}, media_type=JSON
        )
        response = case.call(timeout=60)
        assert response.headers["content-type"][0].startswith("text/event-stream")
        assert response.text.rstrip().endswith("data: [DONE]")
        case.validate_response(response)
    tiny.drained()


def operations(server: Running) -> list[APIOperation]:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    found: Any = list(schema.get_all_operations())
    return [operation.ok() for operation in found]
