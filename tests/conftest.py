"""What holds for every test: no network, one thread, reproducible searches."""

import os
import shutil
import sys

import pytest
from hypothesis import settings

# Read when torch, huggingface_hub and litellm are imported, so set before any test module is.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if shutil.which("nvidia-smi") is None:
    # Without a card our kernels run as Python.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A person's run searches anew each time; CI's run of one commit always searches the same, so that it means something.
settings.register_profile("person", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "person")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long `make soak` goes on: `make soak ARGS="--soak-s 120"`."""
    parser.addoption("--soak-s", type=float, default=600.0, help="seconds that the soak lasts (600)")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """One thread for tests that use torch; tests that do not must not load it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
