"""Which attention backend is chosen, and what is said when it cannot be."""

import logging
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from foreword.base.config import AttentionName, CacheConfig, Config, ModelConfig
from foreword.base.errors import ConfigError
from foreword.runner.attention import sdpa
from foreword.runner.attention.backend import Backend, Ground
from foreword.runner.attention.call import LayerFacts, Scoring, Sight
from foreword.runner.attention.choice import CANDIDATES, Candidate, choose
from foreword.runner.layout import LayerShape, lay_out
from foreword.runner.loader import load_runner
from foreword.runner.memory import KVMemory
from tests.runner import models as pageable
from tests.runner import plain_models as plain


def ground(*, exact: bool = False) -> Ground:
    shape = LayerShape(kv_heads=2, key_dim=16, value_dim=16)
    facts = LayerFacts(layer=0, heads=4, shape=shape, sight=Sight(), scoring=Scoring(0.25))
    memory = KVMemory(lay_out((shape,), 16), 4, torch.float32, torch.device("cpu"))
    return Ground(facts=(facts,), memory=memory, exact=exact)


class Named:
    """As much of a backend as a choice looks at."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, at: Ground) -> Any:
        return self


def table(**obstacles: str | None) -> tuple[Candidate, ...]:
    def obstacle(why: str | None) -> Any:
        return lambda at: why

    return tuple(Candidate(name, obstacle(why), Named(name)) for name, why in obstacles.items())


def chosen(wanted: str, candidates: tuple[Candidate, ...]) -> Backend:
    return choose(wanted, ground(), candidates)


def test_settings_and_table_have_the_same_names() -> None:
    assert set(get_args(AttentionName)) == {"auto", *(candidate.name for candidate in CANDIDATES)}
    assert CANDIDATES[-1].name == "sdpa", "the one that is always possible comes last"


def test_auto_takes_the_first_that_is_possible(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "foreword.runner.attention.choice")
    assert chosen("auto", table(a=None, b=None)).name == "a"
    assert caplog.messages == ["attention: a"]
    assert chosen("auto", table(a="it rains", b=None, c=None)).name == "b"
    assert caplog.messages[1:] == ["attention: b (not a: it rains)"]


def test_a_name_is_taken_at_its_word() -> None:
    assert chosen("b", table(a=None, b=None)).name == "b"
    with pytest.raises(ConfigError, match=r"attention is a, .*it rains.*; use --attention auto or b$"):
        chosen("a", table(a="it rains", b=None))
    with pytest.raises(ConfigError, match="no such backend"):
        chosen("z", table(a=None))


def test_a_candidate_sees_what_is_asked() -> None:
    picky = Candidate("quick", lambda at: "it is not exact" if at.exact else None, Named("quick"))
    both = (picky, *CANDIDATES)
    assert choose("auto", ground(), both).name == "quick"
    assert choose("auto", ground(exact=True), both).name != "quick"


def test_sdpa_is_always_possible() -> None:
    at = ground()
    assert sdpa.obstacle(at) is None
    made = choose("sdpa", at)
    assert made.name == "sdpa"
    assert made.exact


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, config in (("llama", pageable.CONFIGS["llama"]()), ("mamba", plain.CONFIGS["mamba"]())):
        saved: Any = pageable.build(config)
        saved.save_pretrained(folder / name)
    return folder


def load(models: Path, name: str, attention: AttentionName) -> Any:
    settings = ModelConfig(model=str(models / name), cache_dir=str(models), attention=attention)
    return load_runner(Config(model=settings, cache=CacheConfig(kv_cache="8")))


def test_a_backend_is_named_on_the_card(models: Path) -> None:
    card = load(models, "llama", "sdpa").card
    assert card.attention == "sdpa"
    assert card.ingredients["attention"].startswith("sdpa")


def test_a_plain_model_takes_no_backend(models: Path) -> None:
    assert load(models, "mamba", "auto").card.not_cacheable
    with pytest.raises(
        ConfigError, match=r"attention is sdpa, but mamba is served with its own.*leave --attention out"
    ):
        load(models, "mamba", "sdpa")
