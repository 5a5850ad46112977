"""A model directory's own tokenizer: text to ids as `/v1/completions` does it, and the chat template's text.

Knows no request, no limit and no engine. Loading imports `transformers`, which takes seconds, so it waits for the
first use (or for `load`).
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, cast

from foreword.base.errors import ModelRefused, RequestError
from foreword.text.borders import Borders, borders_of
from foreword.text.vocabulary import Spelling, Vocabulary

Message = Mapping[str, Any]
"""One chat message: at least `role`, and `content`."""


_SHOWN = 300
"""Characters of an error of the library that are shown."""


class _Encoding(Protocol):
    @property
    def ids(self) -> list[int]: ...


class _Backend(Protocol):
    """What we use of `tokenizers.Tokenizer`; every method is safe to call from any thread."""

    decoder: Any

    def encode(self, sequence: str, *, add_special_tokens: bool) -> _Encoding: ...
    def id_to_token(self, token: int, /) -> str | None: ...
    def get_added_tokens_decoder(self) -> dict[int, Any]: ...
    def no_truncation(self) -> None: ...
    def no_padding(self) -> None: ...


class _Loaded(Protocol):
    """What we use of a `transformers` tokenizer."""

    chat_template: Any
    all_special_ids: list[int]

    def __len__(self) -> int: ...
    def get_vocab(self) -> dict[str, int]: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...
    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: list[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        tokenize: bool,
    ) -> str: ...


class ResponseParser(Protocol):
    """What we use of transformers' incremental parser of answers."""

    def feed(self, text: str) -> list[dict[str, Any]]:
        """What is known now, as events: a region opens, has more text, closes with its value."""
        ...

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The whole message, and the last events. Both raise what their parts raise."""
        ...


class Tokenizer:
    """The tokenizer in one directory. Every method may be called from any thread."""

    def __init__(self, directory: str | Path) -> None:
        """`directory` holds `tokenizer.json` (or another form that transformers reads). Nothing is read yet."""
        self.directory = Path(directory)
        self._lock = Lock()

    def load(self) -> None:
        """Read the files now. Raises ModelRefused when the directory has no tokenizer that can be read."""
        with self._lock:
            _ = self._loaded
        # Of a folder without a tokenizer's files transformers makes one of some families that knows no text.
        if not self.encode("The 1st", add_special_tokens=False):
            raise ModelRefused(f"{self.directory} has no tokenizer: what is there makes no token of any text")
        _ = self.vocabulary, self.borders

    def encode(self, text: str, *, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        """Ids of `text`; special tokens that are spelled out in it count as such.

        `add_special_tokens` adds what the model puts around a plain prompt (often a beginning-of-text id).
        Raises RequestError naming `field` when the text is not Unicode (a lone surrogate).
        """
        self.check(text, field)
        backend = self._backend
        if backend is not None:
            return backend.encode(text, add_special_tokens=add_special_tokens).ids
        with self._lock:
            return self._loaded.encode(text, add_special_tokens=add_special_tokens)

    def check(self, text: str, field: str) -> None:
        """Raises RequestError naming `field` when the text is not Unicode (a lone surrogate)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{field} is not valid Unicode: a lone surrogate at character {error.start}", field=field
            ) from None

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The chat template's text, ending where the answer begins; raises what the template raises."""
        return self._tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, add_generation_prompt=True, tokenize=False
        )

    def parser(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> ResponseParser | None:
        """What reads the answer to `prompt`, by the response template that the tokenizer brings; None without one."""
        make = getattr(self._tokenizer, "get_response_parser", None)  # not in every release of transformers
        if make is None or getattr(self._tokenizer, "response_template", None) is None:
            return None
        return cast(ResponseParser, make(prefix=prompt, tools=list(tools)))

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings a chat template."""
        return bool(self._tokenizer.chat_template)

    @property
    def size(self) -> int:
        """Number of ids that the tokenizer knows; the model may have more rows (padding)."""
        return len(self._tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """No id stands for more characters of text than this, so n characters are at least n / this many tokens."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are no text: control tokens."""
        return self.vocabulary.special_ids

    @cached_property
    def borders(self) -> Borders | None:
        """Where texts may be cut before they are tokenised; None if no cut is known to be harmless."""
        backend = self._backend
        return None if backend is None else borders_of(backend.get_added_tokens_decoder().values(), self.encode)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What each id spells."""
        tokenizer, backend = self._tokenizer, self._backend
        if backend is None:
            special, decoder = frozenset(tokenizer.all_special_ids), None
        else:
            added = backend.get_added_tokens_decoder()
            special = frozenset(token for token, entry in added.items() if entry.special)
            decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        lookup = tokenizer.convert_ids_to_tokens if backend is None else backend.id_to_token
        return Vocabulary(
            name=lookup, decode=self._decode, spelling=Spelling.of(decoder), special_ids=special, anchor=self._anchor()
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a whole list of ids, special tokens left out."""
        return self._decode(ids)

    def spell(self, ids: Sequence[int]) -> str:
        """As `decode`, with special tokens written out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _anchor(self) -> int | None:
        ids = self.encode("a", add_special_tokens=False)
        return ids[-1] if ids else None

    @property
    def _tokenizer(self) -> _Loaded:
        if "_loaded" not in self.__dict__:
            self.load()
        return self._loaded

    @cached_property
    def _loaded(self) -> _Loaded:
        if not self.directory.is_dir():
            raise ModelRefused(f"{self.directory} is not a directory, so there is no tokenizer in it")
        from transformers import AutoTokenizer  # seconds, and torch with it: only when a model is served

        load = cast(Any, AutoTokenizer).from_pretrained
        try:
            loaded = load(str(self.directory), local_files_only=True)
        except Exception as error:  # transformers raises a different type for every way to be broken
            why = " ".join(str(error).split())
            raise ModelRefused(f"{self.directory} has no tokenizer that can be read: {why[:_SHOWN]}") from error
        return cast(_Loaded, loaded)

    @cached_property
    def _backend(self) -> _Backend | None:
        backend = cast(_Backend | None, getattr(self._tokenizer, "backend_tokenizer", None))
        if backend is not None:  # a tokenizer file may carry the cut-off of its training
            backend.no_truncation()
            backend.no_padding()
        return backend
