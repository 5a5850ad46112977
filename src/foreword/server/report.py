"""One request's account in the forms that callers read: OpenAI's `usage` and our `cache` object."""

from collections.abc import Sequence

from foreword.schedule.plan import Usage
from foreword.server.service import Service
from foreword.server.wire import CacheReport, Reply, Saved, Timings


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


def report_of(usage: Usage, service: Service) -> CacheReport:
    """What the cache did for one prompt."""
    return CacheReport(
        cached_tokens=usage.cached_tokens,
        computed_tokens=usage.computed_tokens,
        recomputed_tokens=usage.recomputed_tokens,
        reason=usage.reason,
        at_token=usage.cached_tokens,
        tiers={"device": usage.cached_tokens},
        where=None,  # which message it was is not found out yet
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
