"""Answers as messages, by the response template beside the tokenizer: words, thoughts, calls, and no word lost."""

import json
from pathlib import Path
from typing import Any

import pytest

from foreword.text.speech import Said, Speech
from foreword.text.tokenizer import Tokenizer
from tests.text.tooling import ANYTHING, RESPONSES, tokenizer_folder, tool

TOOLS = [tool("weather", city={"type": "string"}, days={"type": "integer"})]
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def read(folder: Path, source: Path, text: str, step: int, *, responses: Any = RESPONSES, prompt: str = PROMPT) -> Said:
    """All that is said in a text that comes in pieces of so many characters."""
    folder.mkdir(exist_ok=True)
    parser = Tokenizer(tokenizer_folder(source, folder, responses=responses)).parser(prompt, TOOLS)
    assert parser is not None
    speech = Speech(parser)
    said = [speech.push(text[at : at + step]) for at in range(0, len(text), step)]
    said.append(speech.finish())
    return Said(
        "".join(one.text for one in said),
        "".join(one.reasoning for one in said),
        tuple(call for one in said for call in one.calls),
    )


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_words_thoughts_and_calls(embedded_directory: Path, tmp_path: Path, step: int) -> None:
    text = f"Let me look.<think>Is it Rome?</think>{ROME}{ROME.replace('Rome', 'Oslo')}"
    said = read(tmp_path / "m", embedded_directory, text, step)
    assert (said.text, said.reasoning) == ("Let me look.", "Is it Rome?")
    assert [call.name for call in said.calls] == ["weather", "weather"]
    assert [json.loads(call.arguments)["city"] for call in said.calls] == ["Rome", "Oslo"]
    assert len({call.id for call in said.calls}) == 2


@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize(
    "wrong",
    [
        "<tool_call>not JSON</tool_call> at all",
        '<tool_call>{"arguments": {}}</tool_call> at all',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call> at all',
        '<tool_call>{"name": "f", "arguments": []}</tool_call> at all',
        "<tool_call> and no end",
    ],
)
def test_what_cannot_be_read_is_text(embedded_directory: Path, tmp_path: Path, wrong: str, step: int) -> None:
    said = read(tmp_path / "m", embedded_directory, f"Well. {wrong}", step)
    assert (said.text, said.reasoning, said.calls) == (f"Well. {wrong}", "", ())
    good = read(tmp_path / "n", embedded_directory, f"{ROME}Well. {wrong}", step)
    assert good.text.endswith(f"Well. {wrong}")
    assert len(good.calls) == 1


def test_what_the_template_has_begun_is_gone_on_with(embedded_directory: Path, tmp_path: Path) -> None:
    said = read(tmp_path / "m", embedded_directory, "Rome?</think>Yes.", 3, prompt=f"{PROMPT}<think>")
    assert (said.text, said.reasoning) == ("Yes.", "Rome?")


def test_any_answer_as_a_call(embedded_directory: Path, tmp_path: Path) -> None:
    said = read(tmp_path / "m", embedded_directory, "weather is fine", 4, responses=ANYTHING)
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == [("weather", {"rest": "is fine"})]
    assert said.text == ""


def test_a_tokenizer_without_a_response_template(tokenizer: Tokenizer) -> None:
    assert tokenizer.parser(PROMPT, TOOLS) is None
