"""The rules hold in the source, and each of them complains about what it forbids."""

import ast
from pathlib import Path

import pytest

from tests.architecture import rules
from tests.architecture.source import HEART, PACKAGE, listed, place, python_files, read, room

SOURCE = tuple(python_files("src"))


def complaints(rule: rules.Rule, files: tuple[Path, ...]) -> str:
    return listed(f"{place(path, line)}: {what}" for path in files for line, what in rule(read(path)))


def test_the_environment_is_read_by_cli_and_cluster_only() -> None:
    files = tuple(path for path in SOURCE if room(path) not in {"cli", "cluster"})
    assert not complaints(rules.no_environment, files)


@pytest.mark.parametrize("rule", [rules.no_pickle, rules.no_module_level_mutables, rules.no_empty_words])
def test_rules_for_all_rooms(rule: rules.Rule) -> None:
    assert not complaints(rule, SOURCE)


def test_the_heart_imports_nothing_with_effects() -> None:
    heart = tuple(path for path in SOURCE if room(path) in HEART)
    assert not complaints(rules.only_pure_imports, heart)


def test_modules_and_folders_have_names_that_say_something() -> None:
    empty = {"manager", "handler", "handlers", "util", "utils", "common", "helpers", "misc"}
    named = [part for path in SOURCE for part in path.relative_to(PACKAGE).with_suffix("").parts]
    assert [part for part in named if rules.words(part) & empty] == []


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        (rules.no_environment, "import os\nhome = os.environ['HOME']"),
        (rules.no_environment, "import os\ndef f():\n    return os.getenv('HOME')"),
        (rules.no_environment, "from os import environ"),
        (rules.no_pickle, "def f():\n    import pickle"),
        (rules.no_pickle, "from cloudpickle import dumps"),
        (rules.no_pickle, "import torch\nw = torch.load('w.pt')"),
        (rules.no_pickle, "np.load(f, allow_pickle=True)"),
        (rules.no_module_level_mutables, "SEEN = {}"),
        (rules.no_module_level_mutables, "SEEN: dict[str, int] = {'a': 1}"),
        (rules.no_module_level_mutables, "import threading\nLOCK = threading.Lock()"),
        (rules.no_module_level_mutables, "if True:\n    waiting = deque[int]()"),
        (rules.no_module_level_mutables, "def f():\n    global count\n    count = 1"),
        (rules.no_module_level_mutables, "HITS = Counter('hits', 'Hits.')"),
        (rules.no_empty_words, "class BlockManager: ..."),
        (rules.no_empty_words, "def error_handler(): ..."),
        (rules.no_empty_words, "class HTTPMixin: ..."),
        (rules.no_empty_words, "class CommonBlock: ..."),
        (rules.only_pure_imports, "import numpy as np"),
        (rules.only_pure_imports, "from time import monotonic"),
        (rules.only_pure_imports, "def f():\n    import logging"),
    ],
)
def test_a_broken_rule_is_found(rule: rules.Rule, broken: str) -> None:
    assert list(rule(ast.parse(broken)))


@pytest.mark.parametrize(
    ("rule", "fine"),
    [
        (rules.no_environment, "import os\nsize = os.cpu_count()"),
        (rules.no_pickle, "import json\njson.load(f)"),
        (rules.no_module_level_mutables, "UNITS: Mapping[str, int] = {'B': 1}\nNAMES = ('a', 'b')\n__all__ = ['f']"),
        (
            rules.no_module_level_mutables,
            "UNITS: Final[Mapping[str, int]] = {'B': 1}\nTokens: TypeAlias = 'array[int]'",
        ),
        (rules.no_module_level_mutables, "log = logging.getLogger(__name__)\nKEEP = frozenset({1})"),
        (rules.no_module_level_mutables, "def f():\n    seen = {}\n    return seen"),
        (rules.no_empty_words, "class Scheduler: ...\ndef common_tokens(): ...\ndef publish(): ..."),
        (rules.only_pure_imports, "from hashlib import sha256\nfrom foreword.base.ids import BlockId"),
    ],
)
def test_what_is_allowed_is_not_complained_about(rule: rules.Rule, fine: str) -> None:
    assert list(rule(ast.parse(fine))) == []
