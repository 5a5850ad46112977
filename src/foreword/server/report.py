"""One request's account in the forms that callers read: OpenAI's `usage` and our `cache` object."""

from collections.abc import Sequence
from dataclasses import asdict

import anyio.to_thread

from foreword.cache.explain import Explanation
from foreword.front.advice import Advice
from foreword.front.where import Where
from foreword.schedule.plan import Usage
from foreword.server.service import Answer, Service
from foreword.server.wire import AdviceReply, CacheReport, LeftReply, Reply, Saved, Timings, WhereReply


class PromptTokensDetails(Reply):
    """Where the prompt's tokens came from."""

    cached_tokens: int
    """Always there; 0 on a miss."""


class UsageReply(Reply):
    """OpenAI's account of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(usages: Sequence[Usage]) -> UsageReply:
    """The account of all prompts of a request together."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return UsageReply(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(usage.cached_tokens for usage in usages)),
    )


async def report_of(usage: Usage, answer: Answer, service: Service) -> CacheReport:
    """What the cache did for one prompt."""
    where, advice = await anyio.to_thread.run_sync(lambda: (answer.where(usage.explanation), answer.advice()))
    return CacheReport(
        cached_tokens=usage.cached_tokens,
        computed_tokens=usage.computed_tokens,
        recomputed_tokens=usage.recomputed_tokens,
        tail_tokens=usage.tail_tokens,
        recalled_tokens=usage.recalled_tokens,
        reason=usage.reason,
        at_token=usage.explanation.at_token,
        tiers={"device": usage.cached_tokens},
        left=left_of(usage.explanation, usage.left_ago_s),
        where=where_of(where),
        advice=None if advice is None else advice_of(advice),
        cache_read_input_tokens=usage.cached_tokens,
        cache_creation_input_tokens=usage.stored_tokens,
        timings=Timings(
            queue_s=usage.queue_s,
            tokenize_s=usage.tokenize_s,
            lookup_s=usage.lookup_s,
            fetch_s=0.0,  # there is no tier below the device to fetch from
            prefill_s=usage.prefill_s,
            first_token_s=usage.first_token_s,
        ),
        saved=Saved(
            prefill_flops=service.prefill_flops(usage.cached_tokens),
            seconds=usage.cached_tokens * service.metrics.pace.token_s,
        ),
    )


def left_of(explanation: Explanation, ago_s: float | None) -> LeftReply | None:
    """How what a match misses left."""
    left = explanation.left
    return None if left is None or ago_s is None else LeftReply(cause=left.cause, ago_s=max(0.0, ago_s))


def where_of(where: Where | None) -> WhereReply | None:
    """A place in a request."""
    return None if where is None else WhereReply.model_validate(asdict(where))


def advice_of(advice: Advice) -> AdviceReply:
    """What to change in a prompt."""
    fields = asdict(advice)
    return AdviceReply(calls=fields.pop("num_calls"), **fields)
