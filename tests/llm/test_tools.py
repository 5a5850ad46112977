"""Tools in the library: the embedded model's template writes none, and says so on every verb."""

from collections.abc import Callable
from typing import Any

import pytest

from foreword import LLM
from foreword.base.errors import RequestError
from tests.text.tooling import called, tool

HELLO = {"role": "user", "content": "How warm is it in Rome?"}
TOOLS = [tool("weather", "How warm it is there", city={"type": "string"})]


def test_tools_that_the_template_does_not_write_are_refused_by_every_verb(llm: LLM) -> None:
    verbs: list[Callable[..., object]] = [llm.chat, llm.lookup, llm.warm, llm.pin, llm.unpin, llm.flush]
    for verb in verbs:
        with pytest.raises(RequestError, match="template does not write them") as caught:
            verb([HELLO], tools=TOOLS)
        assert caught.value.field == "tools"
        with pytest.raises(RequestError, match=r"function\.name") as caught:
            verb([HELLO], tools=[{"type": "function", "function": {"name": "a b"}}])
        assert caught.value.field == "tools.0.function.name"
    assert llm.chat([HELLO], tools=[], max_tokens=1).tool_calls == ()


def test_tools_belong_to_messages(llm: LLM) -> None:
    for prompt in ("text", [1, 2, 3]):
        with pytest.raises(RequestError, match="belong to messages") as caught:
            llm.lookup(prompt, tools=TOOLS)
        assert caught.value.field == "tools"
    with pytest.raises(RequestError) as caught:
        llm.flush(tools=TOOLS)
    assert caught.value.field == "prompt"


def test_results_are_messages_like_any_other_for_a_template_that_writes_all_roles(llm: LLM) -> None:
    result: dict[str, Any] = {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"}
    answer = llm.chat([HELLO, {"role": "assistant", "content": "I look."}, result], max_tokens=2)
    assert answer.prompt_tokens > 30
    with pytest.raises(RequestError) as caught:
        llm.chat([HELLO, called("weather", '{"city": "Rome"}'), result], max_tokens=2)
    assert caught.value.field == "messages.1.tool_calls"
