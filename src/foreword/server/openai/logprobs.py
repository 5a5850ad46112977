"""Log-probabilities in OpenAI's two shapes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.front.ask import TokenText
from foreword.server.openai.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob


def chat_logprobs(tokens: Sequence[TokenText]) -> ChatLogprobs:
    """The chat route's shape: one object per token."""
    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=token.text,
                logprob=_number(token.logprob),
                bytes=list(token.raw),
                top_logprobs=[
                    TopLogprob(token=text, logprob=_number(logprob), bytes=list(raw))
                    for _, text, raw, logprob in token.top
                ],
            )
            for token in tokens
        ]
    )


@dataclass(slots=True)
class CompletionLogprobsWriter:
    """The completion route's shape: parallel lists, whose text offsets run on from chunk to chunk of a stream."""

    with_top: bool
    offset: int = field(default=0)

    def write(self, tokens: Sequence[TokenText]) -> CompletionLogprobs:
        """Lists for the next tokens."""
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self.offset)
            self.offset += len(token.text)
        return CompletionLogprobs(
            tokens=[token.text for token in tokens],
            token_logprobs=[_number(token.logprob) for token in tokens],
            top_logprobs=[_top(token) for token in tokens] if self.with_top else None,
            text_offset=offsets,
        )


def _top(token: TokenText) -> dict[str, float]:
    """Text -> log-probability of the most likely tokens and of the chosen one; the likelier of two equal texts."""
    rows = {text: _number(logprob) for _, text, _, logprob in reversed(token.top)}
    rows.setdefault(token.text, _number(token.logprob))
    return dict(sorted(rows.items(), key=lambda row: -row[1]))


def _number(logprob: float | None) -> float:
    """A finite number: JSON has no infinity, and OpenAI writes -9999 for "never"."""
    return -9999.0 if logprob is None else max(logprob, -9999.0)
