"""Ids to text, one token at a time, never half a character.

    ids     61 | 4020 | 233 | 142 | 187 | ...
    bytes   "a"| " b" | E4  | BD  | A0  |          from the vocabulary's table
    text    "a"| " b" | ""  | ""  | "你"|          what a UTF-8 decoder lets go of

The pieces, joined, are what the tokenizer makes of the whole list, with two exceptions, by choice. A character that is
still open at the end is dropped, where the tokenizer shows a U+FFFD: an answer that its limit cuts off ends before it.
And where a sentencepiece tokenizer's run of byte tokens is not valid UTF-8, the tokenizer replaces the run's valid
characters too; here they stay, because they were sent already.
"""

from codecs import getincrementaldecoder

from foreword.text.vocabulary import Vocabulary

_Utf8 = getincrementaldecoder("utf-8")


class Detokenizer:
    """One answer's text as it grows. The cost of a token does not depend on how long the answer is."""

    __slots__ = ("_at_start", "_utf8", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, *, continues: bool = False) -> None:
        """`continues`: text stands in front of the answer, so that its first token keeps its leading space."""
        self._vocabulary = vocabulary
        self._utf8 = _Utf8("replace")
        self._at_start = not continues

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is open, and for special tokens."""
        if not self._at_start:
            return self._utf8.decode(self._vocabulary.inner(token))
        if token in self._vocabulary.special_ids:
            return ""
        self._at_start = False
        return self._utf8.decode(self._vocabulary.first(token))
