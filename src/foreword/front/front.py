"""The one way in for every face: an `Ask` becomes a checked and hashed submission, and an `Answer` comes back."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from uuid import uuid4

from foreword.base.errors import RequestError
from foreword.base.ids import RequestId
from foreword.cache.identity import Chain, Space, Tenant
from foreword.engine.client import EngineClient
from foreword.front.advice import Advisor
from foreword.front.answer import Answer, Reading
from foreword.front.ask import SOMEBODY, Ask, Caller, Conversation
from foreword.front.bounds import Bounds, check_ids, keep_of, key_of, reach_of, sampling_of
from foreword.front.where import Source
from foreword.schedule.request import Submission
from foreword.text.chat import chat_text
from foreword.text.recall import Read, Recall
from foreword.text.speech import Speech
from foreword.text.tokenizer import Message, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What is served at one moment. It is replaced as a whole, so that no request sees a half of two."""

    tokenizer: Tokenizer
    space: Space
    """Where every chain starts: the model's root, and what all tenants share."""
    bounds: Bounds
    recall: Recall
    """The answers that this model gave; another model begins with none."""
    advisor: Advisor = field(default_factory=Advisor)
    """What it noticed in the prompts; likewise."""


class Front:
    """Text in, text out, for one served model. Every method may be called from any thread.

    `submit` tokenises and hashes in the calling thread: microseconds for a chat turn, tens of milliseconds for a
    hundred thousand tokens.
    """

    __slots__ = ("_engine", "served")

    def __init__(self, engine: EngineClient, served: Served) -> None:
        self._engine = engine
        self.served = served
        """Read once by each request; whoever changes what is served puts a new one here."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The served model's tokenizer."""
        return self.served.tokenizer

    def submit(self, ask: Ask, caller: Caller = SOMEBODY) -> Answer:
        """Check, tokenise, hash and queue one request.

        Raises RequestError naming the field and the limit, CapacityError when the queue is full or the caller has too
        many requests in it, Unavailable when nobody computes.
        """
        served, now = self.served, self._engine.now
        start = now()
        read = read_prompt(ask.prompt, served, caller.tenant)
        prompt = read.ids
        tokenized = start if isinstance(ask.prompt, tuple) else now()
        bounds = replace(served.bounds, limits=served.bounds.limits.of(caller.tenant.name))
        sampling = sampling_of(ask, len(prompt), bounds)
        reach, keep, key = reach_of(ask, len(prompt)), keep_of(ask), key_of(ask)
        checked = now()
        chain = Chain(served.space, prompt, tenant=caller.tenant)
        submission = Submission(
            id=RequestId(uuid4().hex),
            chain=chain,
            sampling=sampling,
            arrival_s=start if caller.arrived_s is None else caller.arrived_s,
            tokenize_s=tokenized - start,
            lookup_s=now() - checked,
            reach=reach,
            keep=keep,
            key=key,
            max_live=caller.max_live,
            recalled_tokens=read.num_recalled,
        )
        vocabulary = served.tokenizer.vocabulary
        reading = Reading(
            vocabulary=vocabulary,
            stops=ask.stop,
            stop_ids=sampling.stop_ids,
            continues=prompt[-1] not in vocabulary.special_ids,
            logprobs=sampling.logprobs is not None,
            place=read.place if ask.store else None,
            speech=_speech_of(ask.prompt, read.text, served),
        )
        source = Source(served.tokenizer, ask.prompt, prompt)
        return Answer(
            self._engine,
            self._engine.submit(submission),
            reading,
            prompt_tokens=len(prompt),
            source=source if ask.report else None,
            hear=partial(served.advisor.hear, chain, source) if ask.store else None,
        )

    def render_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of a conversation through the model's chat template, ready for the assistant's turn.

        Raises RequestError naming `messages` when they do not fit the template or there is none.
        """
        return ids_of(Conversation(messages), self.served)


def ids_of(prompt: str | tuple[int, ...] | Conversation, served: Served) -> tuple[int, ...]:
    """A prompt as token ids, whoever sends it. Raises RequestError naming `prompt` or `messages`."""
    if isinstance(prompt, tuple):
        check_ids(prompt, served.bounds.vocab_size)
        return prompt
    text, raw, field = _text_of(prompt, served)
    return tuple(served.tokenizer.encode(text, add_special_tokens=raw, field=field))


def read_prompt(prompt: str | tuple[int, ...] | Conversation, served: Served, tenant: Tenant) -> Read:
    """As `ids_of`, but an answer that the tenant got and sends back has the ids that it was given in."""
    if isinstance(prompt, tuple):
        return Read(ids_of(prompt, served))
    text, raw, field = _text_of(prompt, served)
    return served.recall.read(text, tenant.name, add_special_tokens=raw, field=field)


def _text_of(prompt: str | Conversation, served: Served) -> tuple[str, bool, str]:
    """The prompt's text, whether the model's own tokens are put around it, and the field that it came in."""
    if isinstance(prompt, str):
        _check_length(len(prompt), "prompt", served)
        return prompt, True, "prompt"
    text = chat_text(served.tokenizer, prompt.messages, prompt.tools)
    _check_length(len(text), "messages", served)
    return text, False, "messages"


def _speech_of(prompt: str | tuple[int, ...] | Conversation, text: str, served: Served) -> Speech | None:
    """What tells calls from words in the answer, if tools may be called and the tokenizer knows how calls look."""
    if not isinstance(prompt, Conversation) or not prompt.tools:
        return None
    parser = served.tokenizer.parser(text, prompt.tools)
    return None if parser is None else Speech(parser)


def _check_length(num_characters: int, field: str, served: Served) -> None:
    """Refuse a text that cannot fit however it is tokenised: tokenising megabytes takes minutes and gigabytes."""
    context = served.bounds.limits.max_context
    most = context * served.tokenizer.longest_token
    if num_characters > most:
        raise RequestError(
            f"{field} has {num_characters} characters; the context of {context} tokens holds at most {most}",
            field=field,
        )
