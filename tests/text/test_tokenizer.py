"""Text to ids as a plain completion does it."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from foreword.base.errors import ModelRefused, RequestError
from foreword.text.tokenizer import Tokenizer
from tests.text.samples import SAMPLES


@pytest.mark.parametrize("text", SAMPLES)
def test_ids_are_those_of_the_library(embedded_directory: Path, tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == AutoTokenizer.from_pretrained(embedded_directory)(text)["input_ids"]


def test_sizes_and_special_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.size == 49152
    assert {0, 1, 2} <= tokenizer.special_ids
    assert tokenizer.has_chat_template


def test_a_lone_surrogate_is_the_callers_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="character 2") as caught:
        tokenizer.encode("ab\udfff")
    assert caught.value.field == "prompt"


def test_the_files_cut_off_is_not_ours(embedded_directory: Path, tmp_path: Path) -> None:
    content = json.loads((embedded_directory / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_bytes((embedded_directory / "tokenizer_config.json").read_bytes())
    assert len(Tokenizer(tmp_path).encode("one two three four five six seven")) == 7


def test_many_threads_get_the_same_ids(embedded_directory: Path) -> None:
    fresh = Tokenizer(embedded_directory)  # loaded by whichever thread comes first
    text = " ".join(SAMPLES)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: (fresh.encode(text), fresh.vocabulary.inner(500)), range(32)))
    assert len({tuple(ids) for ids, _ in results}) == 1
    assert len({raw for _, raw in results}) == 1


@pytest.mark.parametrize("make", [lambda path: path / "missing", lambda path: path])
def test_a_directory_without_tokenizer(tmp_path: Path, make) -> None:
    with pytest.raises(ModelRefused, match="tokenizer"):
        Tokenizer(make(tmp_path)).load()


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
def test_a_model_whose_tokenizer_was_forgotten(tmp_path: Path, family: str) -> None:
    """Of some families transformers makes a tokenizer of nothing, which knows no text."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(ModelRefused, match=f"{tmp_path} has no tokenizer"):
        Tokenizer(tmp_path).load()


def test_why_a_tokenizer_cannot_be_read_is_said_in_full(embedded_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes((embedded_directory / "tokenizer_config.json").read_bytes())
    with pytest.raises(ModelRefused, match=r"one of: .*tokenizer.*file"):
        Tokenizer(tmp_path).load()


def test_log_probability_names(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocabulary.shown(2) == b"<|im_end|>"
    assert tokenizer.vocabulary.shown(tokenizer.encode(" Paris")[0]) == b" Paris"
