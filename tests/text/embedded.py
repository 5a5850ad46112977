"""The embedded model's directory, for the tests of every room that reads real text."""

from pathlib import Path

import pytest

from foreword.runner.embedded import SMOLLM2, materialise
from foreword.runner.shelf import cache_folder


@pytest.fixture(scope="session")
def embedded_directory() -> Path:
    """Converted once into the user's cache folder, as `foreword serve` does it."""
    return materialise(SMOLLM2, cache_folder(None), progress=lambda text: None)
