"""The embedded model, loaded once for all tests of this folder that need it."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from foreword.base.config import CacheConfig, Config, DtypeName, ModelConfig
from foreword.runner import library
from foreword.runner.loader import load_runner
from foreword.runner.runner import ModelRunner


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def _runner(dtype: DtypeName) -> ModelRunner:
    runner = load_runner(Config(model=ModelConfig(dtype=dtype), cache=CacheConfig(kv_cache="192")))
    assert isinstance(runner, ModelRunner)
    return runner


@pytest.fixture(scope="package")
def embedded_fp32() -> ModelRunner:
    torch.set_num_threads(1)
    return _runner("float32")


@pytest.fixture(scope="package")
def embedded_bf16() -> ModelRunner:
    torch.set_num_threads(1)
    return _runner("bfloat16")


@pytest.fixture(scope="package")
def library_fp32(embedded_fp32: ModelRunner) -> nn.Module:
    """The same weights, untouched by us."""
    return _library(embedded_fp32, torch.float32)


@pytest.fixture(scope="package")
def library_bf16(embedded_bf16: ModelRunner) -> nn.Module:
    return _library(embedded_bf16, torch.bfloat16)


def _library(runner: ModelRunner, dtype: torch.dtype) -> nn.Module:
    model = library.load_weights(runner.card.directory, dtype)
    library.use_attention(model, "eager")
    return model.eval().requires_grad_(False)
