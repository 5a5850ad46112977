"""Scheduler: who computes what in the next step, and what a step that came back means.

    plan(now)                     hand out tokens            -> Plan, or None when there is nothing to do
    commit(plan, result, now)     believe a step             -> Outcome
    abort(plan, error, now)       disbelieve a step          -> Outcome

Plans may overlap: the next one can be made while a step still runs. Commits come in order; aborting a plan aborts
all later ones. Rules that are kept here (numbers as in docs/design.md, section 5):

    4  a block is findable only after the step that wrote it is committed
    5  a request that gets no tokens and has none in flight holds nothing; the first in turn can always run alone
    6  a claim on a block lives as long as the uncommitted plan that computes it; others wait for that plan
    7  tokens are handed out, not phases
    8  after a failed step its requests run once each alone; only those that fail alone get the error
"""

from collections import deque
from dataclasses import dataclass, field, replace

from foreword.base.errors import InvariantBroken
from foreword.base.ids import PENDING_TOKEN, BlockHash, BlockId, RequestId
from foreword.base.params import FinishReason, Reach
from foreword.cache.explain import Explanation
from foreword.cache.identity import Chain
from foreword.cache.lease import Lease
from foreword.cache.orders import Copy
from foreword.cache.prefix_cache import Flushed, PrefixCache
from foreword.schedule.audit import Auditor
from foreword.schedule.books import Books, books
from foreword.schedule.budget import grant
from foreword.schedule.plan import Chunk, Draw, Outcome, Plan, Sample, StepResult, StepStats, TokenEvent
from foreword.schedule.queue import Queue
from foreword.schedule.request import Request, Submission
from foreword.schedule.tally import Tally


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    spare: int
    """Tokens left for anything beyond the one token that each decoding request is sure of."""
    now: float
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    copies: list[Copy] = field(default_factory=list[Copy])
    claims: list[BlockHash] = field(default_factory=list[BlockHash])
    members: set[RequestId] = field(default_factory=set[RequestId])


@dataclass(frozen=True, slots=True)
class _Flight:
    """An uncommitted plan and the blocks that it computes."""

    plan: Plan
    claims: tuple[BlockHash, ...]


class Scheduler:
    """Owns the requests. Not thread-safe: one thread plans, commits, adds and cancels."""

    __slots__ = (
        "_auditor",
        "_claims",
        "_flights",
        "_max_batch_tokens",
        "_max_running",
        "_preemptions",
        "_requests",
        "_running",
        "_seq",
        "_step",
        "_suspects",
        "_waiting",
        "cache",
    )

    def __init__(
        self, cache: PrefixCache, *, max_batch_tokens: int, max_running: int, auditor: Auditor | None = None
    ) -> None:
        self.cache = cache
        self._auditor = auditor
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._requests: dict[RequestId, Request] = {}
        self._waiting = Queue()
        self._running = Queue()
        self._flights: deque[_Flight] = deque()
        self._claims: set[BlockHash] = set()
        self._suspects: deque[Request] = deque()
        self._step = 0
        self._seq = 0
        self._preemptions = 0

    # ---------------------------------------------------------------- requests come and go

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing and wait for their turn."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    def holders(self) -> dict[str, list[set[BlockId]]]:
        """By tenant: the blocks that each of its running requests holds. From any thread, a moment old."""
        found: dict[str, list[set[BlockId]]] = {}
        for request in self._running:
            lease = request.lease
            if lease is not None:
                found.setdefault(lease.tenant, []).append(set(lease.blocks))
        return found

    def requests(self) -> dict[RequestId, Request]:
        """All that are not over, by id. From any thread, a moment old."""
        return self._requests.copy()

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished or any plan uncommitted."""
        return bool(self._requests) or bool(self._flights)

    def add(self, submission: Submission) -> None:
        """Queue a request that `admission.Limits` has let through."""
        if submission.id in self._requests:
            raise InvariantBroken(f"request id {submission.id} is in use")
        request = Request(submission, self._seq)
        self._seq += 1
        self._requests[request.id] = request
        self._waiting.add(request)

    def cancel(self, name: RequestId, now: float, finish: FinishReason = "cancelled") -> TokenEvent | None:
        """End a request; what it has computed stays cached. None if it is unknown or already over.

        `finish` is "stop" when the caller has seen a stop string and wants no more.
        """
        request = self._requests.get(name)
        if request is None or request.finish is not None:
            return None
        self.cache.advance(now)
        self._end(request, finish)
        return TokenEvent(name, finish=finish, usage=request.usage(now))

    def flush(self) -> Flushed:
        """Forget everything cached; running requests finish on what they hold and publish none of it."""
        return self.cache.flush()

    def lookup(self, chain: Chain, reach: Reach, now: float) -> Explanation:
        """What a request would find now, and why no more. Changes nothing: no order, no counter."""
        self.cache.advance(now)
        return self.cache.explain(chain, reach, self.cache.find(chain, reach)[1], self._claims)

    # ---------------------------------------------------------------- plan

    def plan(self, now: float) -> Plan | None:
        """Hand out this step's tokens. None: nothing can be computed before a plan in flight comes back, or at all."""
        self.cache.advance(now)
        draft = _Draft(spare=self._max_batch_tokens, now=now)
        while self._suspects and self._suspects[0].finish is not None:
            self._suspects.popleft()
        if self._suspects:
            self._plan_suspect(draft)
        else:
            self._plan_running(draft)
            self._plan_waiting(draft)
        if not draft.chunks:
            return None
        plan = Plan(self._step, tuple(draft.chunks), tuple(draft.copies))
        self._step += 1
        self._flights.append(_Flight(plan, tuple(draft.claims)))
        return plan

    def _plan_suspect(self, draft: _Draft) -> None:
        """Alone means alone: nothing else in flight, and nobody holding."""
        if self._flights:
            return
        for request in self._running:
            self._park(request)
        self._admit(self._suspects[0], draft)

    def _plan_running(self, draft: _Draft) -> None:
        line = [(request, request.to_compute) for request in self._running]
        draft.spare -= sum(1 for _, wanted in line if wanted == 1)
        for request, wanted in line:
            if request.lease is None:
                continue  # taken back for an earlier one
            if wanted == 0:
                continue  # its last draw is in flight
            sure = wanted == 1
            tokens = 1 if sure else grant(request.planned, wanted, draft.spare, self.cache.block_size)
            if tokens == 0 or (self._claims and self._claimed(request, request.planned)):
                if not request.in_flight:
                    self._park(request)
                continue
            lease, end = request.lease, request.planned + tokens
            copies = self.cache.reserve(lease, request.planned, end)
            if copies is None:
                copies = self._make_room(request, lease, end, draft)
            if copies is None:
                if request in self._running:
                    return  # memory comes back with a plan in flight; nobody later may take it first
                continue
            draft.spare -= 0 if sure else tokens
            self._give(request, lease, tokens, copies, draft)

    def _make_room(self, request: Request, lease: Lease, end: int, draft: _Draft) -> tuple[Copy, ...] | None:
        """Room for one request, taken from later ones. None: not now (it may have been parked itself)."""
        copies = None
        while copies is None:
            victim, blocked = self._victim(request, draft)
            if victim is None:
                if not blocked and not request.in_flight:
                    self._preempt(request)
                return None
            self._preempt(victim)
            copies = self.cache.reserve(lease, request.planned, end)
        return copies

    def _victim(self, request: Request, draft: _Draft) -> tuple[Request | None, bool]:
        """The latest in turn behind `request` that no plan uses; and whether only plans in flight spare others."""
        blocked = False
        for other in self._running.last_first():
            if other is request:
                break
            if other.id in draft.members:
                continue
            if not other.in_flight:
                return other, blocked
            blocked = True
        return None, blocked

    def _plan_waiting(self, draft: _Draft) -> None:
        for request in self._waiting:
            if len(self._running) >= self._max_running or draft.spare < 1:
                return
            if not self._admit(request, draft):
                return

    def _admit(self, request: Request, draft: _Draft) -> bool:
        """Start a waiting request if it can; False if those behind it must wait as well."""
        cache, reach = self.cache, request.submission.reach
        matched = cache.match(request.chain, reach)
        if self._claims and self._claimed(request, matched * cache.block_size):
            return True
        held = self._hold(request, reach, draft.spare)
        if held is None and not self._running:
            # Alone and still no room: the tail of the match takes a block besides its copy. Do without the tail.
            held = self._hold(request, replace(reach, read_tokens=matched * cache.block_size), draft.spare)
        if held is None:
            return False
        lease, tokens, copies = held
        start = lease.matched_tokens
        if request.accounted == request.cached <= start:  # nothing of it was computed yet
            cache.count_hit(lease)
            request.explanation = cache.explain(request.chain, reach, start, self._claims)
        self._waiting.remove(request)
        self._running.add(request)
        request.lease = lease
        request.computed = request.planned = start
        if start > request.accounted:
            gained = max(0, min(start, request.num_prompt) - request.accounted)
            request.cached += gained
            request.uncounted_cached += gained
            request.accounted = start
        if request.first_planned_s is None:
            request.first_planned_s = draft.now
        draft.spare -= tokens
        self._give(request, lease, tokens, copies, draft)
        return True

    def _hold(self, request: Request, reach: Reach, spare: int) -> tuple[Lease, int, tuple[Copy, ...]] | None:
        """A lease over the request's match, the tokens it gets and room to write them; None if that cannot be now."""
        cache, chain = self.cache, request.chain
        lease = cache.acquire(chain, reach, request.submission.keep)
        start = lease.matched_tokens
        tokens = grant(start, len(chain) - start, spare, cache.block_size)
        whole = -(-(len(chain) + 1) // cache.block_size) - start // cache.block_size
        room = tokens > 0 and (not self._running or whole <= cache.num_available(lease.tenant))
        copies = cache.reserve(lease, start, start + tokens) if room else None
        if copies is None:
            cache.release(lease)
            return None
        return lease, tokens, copies

    def _give(self, request: Request, lease: Lease, tokens: int, copies: tuple[Copy, ...], draft: _Draft) -> None:
        """Write the chunk into the draft and claim the blocks that it computes."""
        chain, size = request.chain, self.cache.block_size
        start, end = request.planned, request.planned + tokens
        known = len(chain.tokens)
        ids = (*chain.tokens[start:end], PENDING_TOKEN) if end > known else tuple(chain.tokens[start:end])
        draw = None
        if end == known + request.draws_in_flight and request.sampling.max_tokens:
            draw = Draw(request.sampling, request.num_generated + request.draws_in_flight)
            request.draws_in_flight += 1
        draft.chunks.append(Chunk(request.id, start, ids, lease.blocks, draw))
        draft.copies += copies
        draft.members.add(request.id)
        if start // size < (known - 1) // size and self.cache.reuses(lease.tenant):
            last = request.submission.reach.storable(min(end, known - 1) // size, size)
            claims = chain.hashes[start // size : last]
            draft.claims += claims
            self._claims.update(claims)
        request.planned = end
        request.in_flight += 1

    def _claimed(self, request: Request, start: int) -> bool:
        """Whether a plan not yet committed computes the block at `start`, so that waiting for it saves work."""
        block = start // self.cache.block_size
        readable = request.submission.reach.readable(len(request.chain) - 1)
        return block < readable // self.cache.block_size and request.chain.hashes[block] in self._claims

    # ---------------------------------------------------------------- commit and abort

    def commit(self, plan: Plan, result: StepResult, now: float) -> Outcome:
        """Believe a step: account, publish, take the drawn tokens, end what is over."""
        self.cache.advance(now)
        self._land(plan)
        tally, events = Tally(), list[TokenEvent]()
        for chunk in plan.chunks:
            request = self._requests[chunk.request]
            tally.add(request, chunk)
            request.computed = end = chunk.end
            stored = self.cache.publish(_leased(request), request.chain, min(end, len(request.chain.tokens)))
            if request.first_token_s is None:
                request.stored += stored
            if chunk.draw is not None:
                request.draws_in_flight -= 1
                if request.finish is None:
                    tally.generated += 1
                    events.append(self._take_sample(request, result.samples[request.id], now))
            elif request.is_warmed and request.finish is None:
                request.first_token_s, request.finish = now, "length"
                events.append(TokenEvent(request.id, finish="length", usage=request.usage(now)))
            if request.finish is not None:
                self._let_go(request)
        if self._suspects and self._suspects[0].id == plan.chunks[0].request:
            self._suspects.popleft()
        preemptions, self._preemptions = self._preemptions, 0
        stats = StepStats(
            num_chunks=len(plan.chunks),
            num_tokens=plan.num_tokens,
            prompt_tokens_cached=tally.cached,
            prompt_tokens_computed=tally.computed,
            tokens_recomputed=tally.recomputed,
            tokens_generated=tally.generated,
            num_preemptions=preemptions,
            tenants=tally.tenants,
        )
        return Outcome(plan.step, tuple(events), stats)

    def abort(self, plan: Plan, error: str, now: float) -> Outcome:
        """Disbelieve a step and all later ones: their requests hold nothing afterwards and will run alone, in turn.

        A request that was running alone for that reason has failed alone: it ends with the error.
        """
        if not self._flights or self._flights[0].plan is not plan:
            raise InvariantBroken(f"plan {plan.step} is to be aborted but is not the oldest in flight")
        self.cache.advance(now)
        flights, events = list(self._flights), list[TokenEvent]()
        self._flights.clear()
        self._claims.clear()
        touched = {c.request: self._requests[c.request] for flight in flights for c in flight.plan.chunks}
        for request in touched.values():
            request.in_flight = request.draws_in_flight = 0
            if request.finish is not None:
                self._let_go(request)
            else:
                self._park(request)
        alone = bool(self._suspects) and self._suspects[0].id == plan.chunks[0].request
        failed = [request for c in plan.chunks if (request := touched[c.request]).finish is None]
        if alone and failed:
            self._end(failed[0], "error")
            events.append(TokenEvent(failed[0].id, finish="error", error=error, usage=failed[0].usage(now)))
        elif not alone:
            self._suspects.extend(request for request in failed if request not in self._suspects)
        return Outcome(plan.step, tuple(events), StepStats(num_chunks=len(plan.chunks), num_failures=1))

    def _land(self, plan: Plan) -> None:
        if not self._flights or self._flights[0].plan is not plan:
            raise InvariantBroken(f"plan {plan.step} is to be committed but is not the oldest in flight")
        self._claims.difference_update(self._flights.popleft().claims)
        for chunk in plan.chunks:
            self._requests[chunk.request].in_flight -= 1

    def _take_sample(self, request: Request, sample: Sample, now: float) -> TokenEvent:
        request.chain.append(sample.token)
        request.num_generated += 1
        first = request.first_token_s is None
        if first:
            request.first_token_s = now
        finish: FinishReason | None = None
        if sample.token in request.sampling.stop_ids:
            finish = "stop"
        elif request.num_generated >= request.sampling.max_tokens:
            finish = "length"
        request.finish = finish
        return TokenEvent(request.id, sample, finish, usage=request.usage(now) if first or finish else None)

    # ---------------------------------------------------------------- leaving

    def _park(self, request: Request) -> None:
        """Back to waiting, holding nothing. Its published blocks stay cached and are found again."""
        self._release(request)
        self._running.remove(request)
        self._waiting.add(request)

    def _preempt(self, request: Request) -> None:
        self._preemptions += 1
        self._park(request)

    def _end(self, request: Request, finish: FinishReason) -> None:
        request.finish = finish
        if not request.in_flight:
            self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """Forget an ended request once no plan uses its blocks."""
        if request.in_flight:
            return
        queue = self._waiting if request.lease is None else self._running
        self._release(request)
        if self._auditor is not None and request.cached:
            self._auditor.note(request.chain)
        queue.remove(request)
        del self._requests[request.id]

    def _release(self, request: Request) -> None:
        if request.lease is not None:
            self.cache.release(request.lease)
        request.lease = None
        request.computed = request.planned = 0

    # ---------------------------------------------------------------- checks

    def books(self, what: str) -> Books:
        """All that is known at the moment of a fault, for whoever has to find its cause."""
        return books(what, self.cache, self._requests.values())

    def check(self) -> None:
        """Raise InvariantBroken if the books contradict each other. O(blocks + requests)."""
        for request in self._requests.values():
            if (request in self._running) == (request in self._waiting):
                raise InvariantBroken(f"request {request.id} is in both queues or in none")
            if (request.lease is None) != (request in self._waiting):
                raise InvariantBroken(f"request {request.id} waits while holding, or runs without a lease")
            if not request.computed <= request.planned <= len(request.chain) + request.draws_in_flight:
                raise InvariantBroken(f"request {request.id} has planned past what is known")
        if len(self._running) + len(self._waiting) != len(self._requests):
            raise InvariantBroken("a queue holds a request that is over")
        self.cache.check([r.lease for r in self._running if r.lease is not None])


def _leased(request: Request) -> Lease:
    if request.lease is None:
        raise InvariantBroken(f"request {request.id} is planned without a lease")
    return request.lease
