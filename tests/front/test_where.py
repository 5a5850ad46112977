"""Where a match ended: the right message, whatever words it has in common with the template."""

import pytest

from foreword.cache.explain import Explanation
from foreword.front.ask import Conversation
from foreword.front.where import Source
from foreword.text.tokenizer import Message, Tokenizer

ROLES = ("system", "user", "assistant", "user")
CONTENTS = ("You are kind.", "Which room?", "Room 12 has two beds and costs 120 euros a night.", "And then?")


@pytest.mark.parametrize("word", ["e", "s", "im", "user", "assistant", "system", "<|im_end|>\nuser", "start|", "And"])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_words_that_the_template_writes_too_are_found_in_their_message(
    tokenizer: Tokenizer, word: str, number: int
) -> None:
    contents = [*CONTENTS[:number], word, *CONTENTS[number + 1 :]]
    messages: list[Message] = [{"role": r, "content": c} for r, c in zip(ROLES, contents, strict=True)]
    text, ends, starts = "", list[int](), list[int]()
    for role, content in zip(ROLES, contents, strict=True):
        starts.append(len(text) + len(f"<|im_start|>{role}\n"))
        ends.append(starts[-1] + len(content))
        text += f"<|im_start|>{role}\n{content}<|im_end|>\n"
    assert tokenizer.render(messages).startswith(text)
    ids = tokenizer.encode(tokenizer.render(messages), add_special_tokens=False)
    source, told = Source(tokenizer, Conversation(messages), tuple(ids)), set[int | None]()
    for at in range(len(ids)):
        offset = len(b"".join(map(tokenizer.vocabulary.shown, ids[:at])).decode())
        expected = next((n for n, end in enumerate(ends) if offset < end), None)
        where = source.where(Explanation("diverged", at))
        assert where is not None
        assert where.message == expected
        told.add(where.message)
        assert where.offset == (None if expected is None else max(0, offset - starts[expected]))
    assert told == {0, 1, 2, 3, None}
