"""One running request as text: pieces as they come, stop strings applied, cancelled when nobody listens."""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace

from foreword.base.ids import RequestId
from foreword.cache.explain import Explanation
from foreword.engine.client import EngineClient
from foreword.engine.stream import Stream
from foreword.front.advice import Advice, Habit
from foreword.front.ask import Piece, TokenText
from foreword.front.where import Source, Where
from foreword.schedule.plan import Sample, TokenEvent, Usage
from foreword.text.detokenizer import Detokenizer
from foreword.text.recall import Place
from foreword.text.speech import Said, Speech
from foreword.text.stops import StopStrings
from foreword.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How one request's tokens become text."""

    vocabulary: Vocabulary
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    """Ids that end the answer and are no part of its text."""
    continues: bool
    """Whether text stands in front of the answer (see `Detokenizer`)."""
    logprobs: bool
    place: Place | None = None
    """Where the answer is written down, for when it comes back as text."""
    speech: Speech | None = None
    """Tells words from calls of tools, where tools may be called."""


_NOTHING = Said()

Hear = Callable[[Explanation, float], Habit | None]
"""Is told once how far the match went, when all is over and what time that is."""


class Answer:
    """An answer in the making. Iterate once, with `for` or `async for`; each way gives the same pieces.

    Leaving the iteration early (break, an exception, a cancelled task, `aclose`) cancels the request, and what it has
    computed stays cached. An answer that is never iterated must be cancelled by hand.
    """

    __slots__ = (
        "_detokenizer",
        "_ended",
        "_engine",
        "_habit",
        "_hear",
        "_ids",
        "_num_tokens",
        "_place",
        "_raw",
        "_reading",
        "_said",
        "_source",
        "_speech",
        "_stops",
        "_stream",
        "_usage",
        "id",
        "prompt_tokens",
    )

    def __init__(
        self,
        engine: EngineClient,
        stream: Stream,
        reading: Reading,
        *,
        prompt_tokens: int,
        source: Source | None = None,
        hear: Hear | None = None,
    ) -> None:
        self.id: RequestId = stream.request
        self.prompt_tokens = prompt_tokens
        self._engine = engine
        self._stream = stream
        self._reading = reading
        self._detokenizer = Detokenizer(reading.vocabulary, continues=reading.continues)
        self._stops = StopStrings(reading.stops)
        self._ids: list[int] = []
        self._num_tokens = 0
        self._source = source
        self._hear = hear
        self._habit: Habit | None = None
        self._place = reading.place
        self._speech = reading.speech
        self._said: list[tuple[str, tuple[int, ...]]] = []
        self._raw = ""
        """Text that no piece has brought yet, or has brought as a call."""
        self._usage: Usage | None = None
        self._ended = False

    def __iter__(self) -> Iterator[Piece]:
        """Pieces, blocking the calling thread; the last one has `finish`."""
        try:
            for event in self._stream:
                piece = self._read(event)
                if piece is not None:
                    yield piece
                if self._ended:
                    return
        finally:
            self.cancel()
            self._close()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Pieces, awaiting on the running loop; the last one has `finish`."""
        try:
            async for event in self._stream:
                piece = self._read(event)
                if piece is not None:
                    yield piece
                if self._ended:
                    return
        finally:
            self.cancel()
            self._close()

    def cancel(self) -> None:
        """Stop the request within a step, from any thread; nothing happens when it has ended."""
        if not self._ended:
            self._engine.cancel(self.id)

    def where(self, explanation: Explanation) -> Where | None:
        """Where in the request the match ended; None if that is no place, or the request asked for no report.

        May take milliseconds: never on an event loop.
        """
        return None if self._source is None else self._source.where(explanation)

    def advice(self) -> Advice | None:
        """What to change in the prompt, once the answer has ended: None unless its match ended where many do.

        None as well if the request asked for no report. May take milliseconds: never on an event loop.
        """
        if self._source is None or self._habit is None:
            return None
        return self._habit.advice(self._engine.now())

    def _read(self, event: TokenEvent) -> Piece | None:
        """One event as a piece; None when it brings nothing to say yet."""
        first_news = event.usage is not None and self._usage is None
        self._usage = event.usage or self._usage
        sample = event.sample
        text = "" if sample is None else self._text_of(sample.token)
        finish, usage = event.finish, self._usage if first_news or event.finish else None
        if self._stops.stopped and finish != "error":
            # The engine may be tokens ahead of the text; the caller's account ends where the caller's text does.
            usage = None if self._usage is None else replace(self._usage, completion_tokens=self._num_tokens)
            if finish is None:
                self._engine.cancel(self.id, "stop")
            finish = "stop"
        elif finish is not None:
            text += self._stops.finish()
        self._ended = finish is not None
        said = self._understood(text)
        tokens = (self._token_text(sample),) if sample is not None and self._reading.logprobs else ()
        if not (said != _NOTHING or tokens or usage or finish):
            return None
        ids, self._ids = tuple(self._ids), []
        piece = Piece(said.text, tokens, finish, usage, event.error, ids, said.reasoning, said.calls)
        if self._place is not None:
            self._said.append((self._raw, ids))
            self._raw = ""
        if self._ended:
            self._close()  # before the caller has it, who may send it back at once
        return piece

    def _close(self) -> None:
        """All is over: what was learnt is kept. Once."""
        self._remember()
        hear, self._hear = self._hear, None
        if hear is not None and self._usage is not None:
            self._habit = hear(self._usage.explanation, self._engine.now())

    def _remember(self) -> None:
        """Write down what was handed out, all or up to where the caller left."""
        if self._place is not None:
            drawn = [token for _, ids in self._said for token in ids]
            self._place.keep("".join(text for text, _ in self._said), drawn)
            self._place, self._said = None, []

    def _text_of(self, token: int) -> str:
        self._num_tokens += 1
        self._ids.append(token)
        if token in self._reading.stop_ids:
            return ""
        text = self._detokenizer.push(token)
        if self._speech is not None and token in self._reading.vocabulary.special_ids:
            text = _lossy(self._reading.vocabulary.shown(token))  # a call may begin with one
        return self._stops.push(text)

    def _understood(self, text: str) -> Said:
        """What this bit of the answer's text is."""
        self._raw += text
        if self._speech is None:
            return Said(text)
        said = self._speech.push(text)
        if not self._ended:
            return said
        rest = self._speech.finish()
        return Said(said.text + rest.text, said.reasoning + rest.reasoning, said.calls + rest.calls)

    def _token_text(self, sample: Sample) -> TokenText:
        shown = self._reading.vocabulary.shown
        raw = shown(sample.token)
        top = tuple((other, _lossy(shown(other)), shown(other), logprob) for other, logprob in sample.top)
        return TokenText(sample.token, _lossy(raw), raw, sample.logprob, top)


def _lossy(raw: bytes) -> str:
    return raw.decode(errors="replace")
