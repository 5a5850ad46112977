"""Tally: what one committed step did for its requests' prompts, each token counted once."""

from foreword.schedule.plan import Chunk, PromptTokens
from foreword.schedule.request import Request


class Tally:
    """Counts of one commit, for StepStats."""

    __slots__ = ("cached", "computed", "generated", "recomputed", "tenants")

    def __init__(self) -> None:
        self.cached = self.computed = self.generated = self.recomputed = 0
        self.tenants: dict[str, PromptTokens] = {}

    def add(self, request: Request, chunk: Chunk) -> None:
        """Each prompt token is counted once, as cached or as computed; work below `accounted` is a repetition."""
        end = chunk.end
        if chunk.start >= request.accounted >= request.num_prompt:
            request.accounted = end
            return
        repeated = max(0, min(end, request.accounted) - chunk.start)
        request.recomputed += repeated
        self.recomputed += repeated
        fresh = max(0, min(end, request.num_prompt) - max(chunk.start, request.accounted))
        self._add_prompt(request.chain.tenant.name, request.uncounted_cached, fresh)
        request.uncounted_cached = 0
        request.accounted = max(request.accounted, end)

    def _add_prompt(self, tenant: str, cached: int, computed: int) -> None:
        """Count prompt tokens, and whose they are."""
        self.cached += cached
        self.computed += computed
        own = self.tenants.get(tenant, PromptTokens())
        self.tenants[tenant] = PromptTokens(own.cached + cached, own.computed + computed)
