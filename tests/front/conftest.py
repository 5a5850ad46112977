"""A front over the embedded model's real tokenizer and an engine that plays what a test tells it."""

from pathlib import Path

import pytest

from foreword.base.ids import BlockHash
from foreword.cache.identity import Space
from foreword.front.bounds import Bounds
from foreword.front.front import Front, Served
from foreword.schedule.admission import limits
from foreword.text.recall import Recall
from foreword.text.tokenizer import Tokenizer
from tests.front.played import PlayedEngine
from tests.text.embedded import embedded_directory
from tests.text.tooling import RESPONSES, tokenizer_folder

__all__ = ["embedded_directory"]

EOS = 2


@pytest.fixture(scope="session")
def tokenizer(embedded_directory: Path) -> Tokenizer:
    return Tokenizer(embedded_directory)


@pytest.fixture(scope="session")
def tooled(embedded_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The same tokenizer, with a template that writes tools and says how to read calls."""
    return Tokenizer(tokenizer_folder(embedded_directory, tmp_path_factory.mktemp("tooled"), responses=RESPONSES))


@pytest.fixture
def engine() -> PlayedEngine:
    return PlayedEngine()


@pytest.fixture
def front(tokenizer: Tokenizer, engine: PlayedEngine) -> Front:
    bounds = Bounds(
        limits=limits(num_blocks=16, block_size=4, max_context=100), vocab_size=49152, end_ids=frozenset({EOS})
    )
    served = Served(tokenizer=tokenizer, space=Space(BlockHash(bytes(32)), 4), bounds=bounds, recall=Recall(tokenizer))
    return Front(engine, served)
