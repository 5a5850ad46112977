"""What each token id spells, as bytes: the table that detokenizing and log-probabilities read.

A token's bytes do not depend on its neighbours, except that some tokenizers drop a space in front of the first one.
So text can be made one token at a time, at a cost that does not grow with the answer.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a tokenizer writes bytes into the names of its tokens."""

    kind: Literal["byte_level", "text"]
    """byte_level: each character of a token's name is one byte (GPT-2's alphabet). text: names are text."""
    byte_tokens: bool = False
    """Whether bytes that no other token covers are tokens named `<0x00>` to `<0xFF>` (sentencepiece)."""

    @staticmethod
    def of(decoder: dict[str, Any] | None) -> "Spelling":
        """Read it off a `tokenizer.json` decoder section; None for a tokenizer that has none."""
        kinds = _decoder_types(decoder)
        if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse", "Sequence"}:
            return Spelling("byte_level")
        return Spelling("text", byte_tokens="ByteFallback" in kinds)


class Vocabulary:
    """Id -> bytes, filled as ids are met. Safe from any thread: an entry is always the same value."""

    __slots__ = (
        "_alphabet",
        "_anchor",
        "_anchor_text",
        "_decode",
        "_first",
        "_inner",
        "_name",
        "_spelling",
        "special_ids",
    )

    def __init__(
        self,
        *,
        name: Callable[[int], str | None],
        decode: Callable[[Sequence[int]], str],
        spelling: Spelling,
        special_ids: frozenset[int],
        anchor: int | None,
    ) -> None:
        """`name` gives an id's name (None for an unknown id), `decode` the text of a list of ids.

        `anchor` is the id of some plain token: put in front of another, it shows what that one spells inside a text.
        """
        self.special_ids = special_ids
        self._name = name
        self._decode = decode
        self._spelling = spelling
        self._anchor = anchor
        self._anchor_text = "" if anchor is None else decode([anchor])
        self._alphabet = _byte_alphabet() if spelling.kind == "byte_level" else {}
        self._inner: dict[int, bytes] = {}
        self._first: dict[int, bytes] = {}

    def inner(self, token: int) -> bytes:
        """What the id adds inside a text; nothing for special and unknown ids."""
        found = self._inner.get(token)
        if found is None:
            found = self._inner[token] = b"" if token in self.special_ids else self._spell(token, self._anchor)
        return found

    def first(self, token: int) -> bytes:
        """What the id spells at the beginning of a text, where some tokenizers drop a space."""
        if self._spelling.kind == "byte_level":
            return self.inner(token)
        found = self._first.get(token)
        if found is None:
            found = self._first[token] = b"" if token in self.special_ids else self._spell(token, None)
        return found

    def shown(self, token: int) -> bytes:
        """The id's bytes for display: as `inner`, and special ids by their names."""
        if token in self.special_ids:
            return (self._name(token) or "").encode()
        return self.inner(token)

    def _spell(self, token: int, anchor: int | None) -> bytes:
        name = self._name(token)
        if name is None:
            return b""
        if self._spelling.kind == "byte_level":
            alphabet = self._alphabet
            return bytes(alphabet[c] for c in name) if all(c in alphabet for c in name) else name.encode()
        if self._spelling.byte_tokens and (byte := _BYTE_TOKEN.fullmatch(name)):
            value = int(byte[1], 16)
            if anchor is not None or value > 0x7F:  # a part of a character; else it may be the space that is dropped
                return bytes([value])
        if anchor is None:
            return self._decode([token]).encode()
        return self._decode([anchor, token])[len(self._anchor_text) :].encode()


def _decoder_types(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    found = {str(decoder["type"])}
    for part in cast(list[dict[str, Any]], decoder.get("decoders", [])):
        found |= _decoder_types(part)
    return found


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
