r"""The ids of answers we gave, found again when a client sends the answer back as text.

Tokenising an answer's text gives other ids than the model drew, now and then; the next turn of a chat would then find
nothing cached from that place on. So a prompt is read part by part, cut where no part's ids depend on its neighbours
(`borders`), and a part that is the end of an earlier prompt and the answer to it takes the ids that were drawn:

    prompt   ... <|im_start|>assistant\n            answer   Yes, 7 :)
    prompt   ... <|im_start|>assistant\nYes, 7 :)  |  <|im_end|>\n  |  <|im_start|>user\n ...
                 `-- the prompt's ids and the answer's

A part is known by a digest of itself and of all text before it: an answer is recalled in the conversation that it was
given in, and nowhere else. Other parts are kept in the same way, so that a long history is tokenised once.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from threading import Lock

from foreword.text.detokenizer import Detokenizer
from foreword.text.tokenizer import Tokenizer

MAX_BYTES = 8 * 2**20
"""What one tenant's answers may take, and its other parts as much again: millions of tokens."""

_START = bytes(32)
_ENTRY_BYTES = 400
"""What an entry takes beside its ids, roughly: digest, objects, a place in a dictionary."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The ids of a part of a text."""

    ids: "array[int]"
    num_recalled: int = 0
    """How many of them were drawn for an answer."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """A part that ended a prompt, and the answer to it, until somebody sends both back."""

    head: _Part
    head_chars: int
    drawn: "array[int]"
    """All that was drawn; the answer's text may end before, at a stop string or in the middle of a character."""


class _Shelf:
    """Entries by digest, those that were used last; from any thread."""

    __slots__ = ("_entries", "_lock", "_max_bytes", "_num_bytes")

    def __init__(self, max_bytes: int) -> None:
        self._entries: OrderedDict[bytes, _Part | _Heard] = OrderedDict()
        self._lock = Lock()
        self._max_bytes = max_bytes
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, name: bytes) -> _Part | _Heard | None:
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None:
                self._entries.move_to_end(name)
            return entry

    def put(self, name: bytes, entry: _Part | _Heard) -> None:
        with self._lock:
            if (old := self._entries.pop(name, None)) is not None:
                self._num_bytes -= _size(old)
            self._entries[name] = entry
            self._num_bytes += _size(entry)
            while self._num_bytes > self._max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self._num_bytes -= _size(oldest)


@dataclass(frozen=True, slots=True)
class _Own:
    """What is remembered for one tenant."""

    answers: _Shelf
    parts: _Shelf


@dataclass(frozen=True, slots=True)
class Place:
    """Where the answer to one prompt is written down."""

    _answers: _Shelf
    _before: bytes
    """Digest of what comes before the prompt's last part."""
    _last: str
    _head: _Part

    def keep(self, text: str, drawn: Sequence[int]) -> None:
        """Remember that this text, exactly, was delivered for these ids. Takes microseconds."""
        if text and drawn:
            heard = _Heard(self._head, len(self._last), array("I", drawn))
            self._answers.put(_digest(self._before, self._last + text), heard)


@dataclass(frozen=True, slots=True)
class Read:
    """A prompt as ids."""

    ids: tuple[int, ...]
    num_recalled: int = 0
    """How many of them are those of earlier answers, and not what tokenising the text gives by rule."""
    place: Place | None = None
    """Where to write the answer down; None where it could not be recalled."""
    text: str = ""
    """What was read; empty for a prompt of ids."""


class Recall:
    """Reads the prompts of one tokenizer's model, and remembers what it said, each tenant's apart."""

    def __init__(self, tokenizer: Tokenizer, *, off: bool = False, max_bytes: int = MAX_BYTES) -> None:
        """`off`: only tokenise. So it is as well where the tokenizer has no borders to rely on."""
        self._tokenizer = tokenizer
        self._borders = None if off else tokenizer.borders
        self._max_bytes = max_bytes
        self._owns: dict[str, _Own] = {}

    @property
    def on(self) -> bool:
        """Whether anything is remembered."""
        return self._borders is not None

    def num_bytes(self, owner: str) -> int:
        """Bytes that a tenant's memory takes, roughly."""
        own = self._owns.get(owner)
        return 0 if own is None else own.answers.num_bytes + own.parts.num_bytes

    def read(self, text: str, owner: str, *, add_special_tokens: bool = True, field: str = "prompt") -> Read:
        """Ids of the text, as `Tokenizer.encode` gives them but for the answers that `owner` got. Raises as it does."""
        borders = self._borders
        if borders is None:
            plain = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, field=field)
            return Read(tuple(plain), text=text)
        self._tokenizer.check(text, field)
        own = self._owns.setdefault(owner, _Own(_Shelf(self._max_bytes), _Shelf(self._max_bytes)))
        *firsts, last = borders.cut(text)
        ids, num_recalled, before = array("I", borders.before if add_special_tokens else ()), 0, _START
        for text_of_part in firsts:
            before = _digest(before, text_of_part)
            part = self._part(own, before, text_of_part, keep=True)
            ids += part.ids
            num_recalled += part.num_recalled
        # The last part is not kept: it will have grown when it comes back.
        part = self._part(own, _digest(before, last), last, keep=False)
        ids += part.ids
        ends = borders.after if add_special_tokens else ()
        ids.extend(ends)
        place = Place(own.answers, before, last, part) if borders.is_at(last) and not ends else None
        return Read(tuple(ids), num_recalled + part.num_recalled, place, text)

    def forget(self, owner: str | None = None) -> None:
        """All of one tenant's, or all; answers that are being made now are not remembered either."""
        if owner is None:
            self._owns = {}
        else:
            self._owns.pop(owner, None)

    def _part(self, own: _Own, name: bytes, text: str, *, keep: bool) -> _Part:
        heard = own.answers.get(name)
        if isinstance(heard, _Part):
            return heard
        if heard is not None:
            part = self._settled(heard, text)
            own.answers.put(name, part)
            return part
        known = own.parts.get(name)
        if isinstance(known, _Part):
            return known
        part = self._tokenised(text)
        if keep:
            own.parts.put(name, part)
        return part

    def _tokenised(self, text: str) -> _Part:
        return _Part(array("I", self._tokenizer.encode(text, add_special_tokens=False)))

    def _settled(self, heard: _Heard, text: str) -> _Part:
        """The drawn ids if they spell the text as well as those that tokenising gives, else the latter."""
        plain = self._tokenised(text)
        head = heard.head
        num_said = self._num_said(heard, text[heard.head_chars :])
        if num_said is None:
            return plain
        ids = head.ids + heard.drawn[:num_said]
        if self._tokenizer.spell(ids) != self._tokenizer.spell(plain.ids):
            return plain
        return _Part(ids, head.num_recalled + num_said)

    def _num_said(self, heard: _Heard, said: str) -> int | None:
        """How many of the drawn ids it takes to say this text; None if no number says it and nothing more."""
        vocabulary = self._tokenizer.vocabulary
        continues = bool(heard.head.ids) and heard.head.ids[-1] not in vocabulary.special_ids
        detokenizer, length = Detokenizer(vocabulary, continues=continues), 0
        for i, token in enumerate(heard.drawn, start=1):
            piece = detokenizer.push(token)
            if not said.startswith(piece, length):
                return None
            length += len(piece)
            if length == len(said):
                return i
        return None


def _digest(before: bytes, text: str) -> bytes:
    return sha256(before + text.encode()).digest()


def _size(entry: _Part | _Heard) -> int:
    ids = len(entry.ids) if isinstance(entry, _Part) else len(entry.head.ids) + len(entry.drawn)
    return _ENTRY_BYTES + 4 * ids
