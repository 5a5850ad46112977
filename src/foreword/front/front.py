"""The one way in for every face: an `Ask` becomes a checked and hashed submission, and an `Answer` comes back."""

from collections.abc import Sequence
from time import perf_counter
from uuid import uuid4

from foreword.base.ids import RequestId
from foreword.cache.identity import Chain, Space
from foreword.engine.client import EngineClient
from foreword.front.answer import Answer, Reading
from foreword.front.ask import Ask
from foreword.front.bounds import Bounds, check_ids, reach_of, sampling_of
from foreword.schedule.request import Submission
from foreword.text.chat import chat_ids
from foreword.text.tokenizer import Message, Tokenizer


class Front:
    """Text in, text out, for one served model. Every method may be called from any thread.

    `submit` and `render_chat` tokenise and hash in the calling thread: microseconds for a chat turn, tens of
    milliseconds for a hundred thousand tokens.
    """

    __slots__ = ("_engine", "_space", "bounds", "tokenizer")

    def __init__(self, *, engine: EngineClient, tokenizer: Tokenizer, space: Space, bounds: Bounds) -> None:
        """Every chain starts in `space`, that of the served model."""
        self._engine = engine
        self._space = space
        self.tokenizer = tokenizer
        self.bounds = bounds

    def submit(self, ask: Ask) -> Answer:
        """Check, tokenise, hash and queue one request.

        Raises RequestError naming the field and the limit, CapacityError when the queue is full or the engine stops.
        """
        arrival_s = self._engine.now()
        start = perf_counter()
        is_text = isinstance(ask.prompt, str)
        prompt = self.tokenizer.encode(ask.prompt) if isinstance(ask.prompt, str) else ask.prompt
        tokenize_s = perf_counter() - start if is_text else 0.0
        if not is_text:
            check_ids(prompt, self.bounds.vocab_size)
        sampling = sampling_of(ask, len(prompt), self.bounds)
        reach = reach_of(ask, len(prompt))
        start = perf_counter()
        chain = Chain(self._space, prompt)
        submission = Submission(
            id=RequestId(uuid4().hex),
            chain=chain,
            sampling=sampling,
            arrival_s=arrival_s,
            lookup_s=perf_counter() - start,
            reach=reach,
        )
        vocabulary = self.tokenizer.vocabulary
        reading = Reading(
            vocabulary=vocabulary,
            stops=ask.stop,
            stop_ids=sampling.stop_ids,
            continues=prompt[-1] not in vocabulary.special_ids,
            logprobs=sampling.logprobs is not None,
        )
        stream = self._engine.submit(submission)
        return Answer(self._engine, stream, reading, prompt_tokens=len(prompt), tokenize_s=tokenize_s)

    def render_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of a conversation through the model's chat template, ready for `Ask.prompt`.

        Raises RequestError naming `messages` when they do not fit the template or there is none.
        """
        return tuple(chat_ids(self.tokenizer, messages))
