"""What people do to the cache by name: look up, warm, pin, unpin, flush, look at the tree, be advised. From any thread.

A prefix is named by its prompt (in the namespace of the tenant that is meant) or by a block of the tree. A block that
is another tenant's is as unknown as one that does not exist.
"""

from dataclasses import dataclass, replace

from foreword.base.errors import NotFound, RequestError, amount
from foreword.base.ids import BlockHash
from foreword.cache.expiry import NEVER
from foreword.cache.explain import Explanation
from foreword.cache.identity import ALONE, Chain, Tenant
from foreword.cache.pins import Pinned
from foreword.cache.prefix_cache import Flushed
from foreword.cache.view import Node, Order, Walk
from foreword.engine.client import EngineClient
from foreword.front.advice import Advice
from foreword.front.answer import Answer
from foreword.front.ask import SOMEBODY, Ask, Caller, Conversation, field_of
from foreword.front.bounds import reach_of, ttl_of
from foreword.front.front import Front, ids_of, read_prompt
from foreword.front.operator import head_ids
from foreword.front.where import Source, Where, spelled

Prefix = str | tuple[int, ...] | Conversation | BlockHash
"""Text, token ids, messages that conversations begin with, or a block of the tree."""

_PUBLIC = "evicted for nobody, so it needs no pin, and stays until its head is shared no longer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a request would find in the cache at this moment."""

    prompt_tokens: int
    cached_tokens: int
    explanation: Explanation
    left_ago_s: float | None
    """How long ago that left which would have matched next, when that is the reason."""
    where: Where | None


@dataclass(frozen=True, slots=True)
class Sight:
    """One node of the tree with its text."""

    node: Node
    text: str
    """How it begins."""
    idle_s: float | None
    """Seconds since its last use; None where that is not shown."""


class Keeper:
    """Verbs over one served model's cache; the same for every face."""

    def __init__(self, front: Front, engine: EngineClient) -> None:
        self._front = front
        self._engine = engine

    def lookup(self, ask: Ask, caller: Caller = SOMEBODY) -> Finding:
        """What this request would find now, and why no more. Computes nothing and changes nothing.

        Raises RequestError as `Front.submit` does for a prompt that cannot be read.
        """
        served = self._front.served
        ids = read_prompt(ask.prompt, served, caller.tenant).ids
        if not ids:
            raise RequestError("the prompt is empty; give at least one token", field="prompt")
        reach = reach_of(ask, len(ids))
        said = self._engine.lookup(Chain(served.space, ids, tenant=caller.tenant), reach)
        return Finding(
            prompt_tokens=len(ids),
            cached_tokens=said.at_token,
            explanation=said,
            left_ago_s=None if said.left is None else self._engine.now() - said.left.moment_s,
            where=Source(served.tokenizer, ask.prompt, ids).where(said),
        )

    def warm(self, ask: Ask, caller: Caller = SOMEBODY) -> Answer:
        """Compute a prompt and store it, without an answer; the end of the `Answer` says that it is done.

        Raises as `Front.submit`, and RequestError where nothing is kept.
        """
        if not self._engine.state().caching:
            raise RequestError("there is nothing to warm: prefixes are not reused here")
        prompt = ask.prompt
        if isinstance(prompt, Conversation) and prompt.messages[-1]["role"] not in ("user", "tool"):
            # What conversations begin with, not a whole turn.
            prompt = head_ids(prompt, self._front.served, caller.tenant)
        return self._front.submit(replace(ask, prompt=prompt, warm=True), caller)

    def pin(self, prefix: Prefix, tenant: Tenant = ALONE, ttl_s: float | None = None) -> Pinned:
        """Let the full blocks of a prefix be evicted last, for `ttl_s` seconds or until it is unpinned.

        Raises RequestError with the budget when it would be exceeded, NotFound for a block that is not the tenant's.
        """
        ttl_s = ttl_of(ttl_s)
        hashes = self._own(prefix, tenant)
        until_s = NEVER if ttl_s is None else self._engine.now() + ttl_s
        pinned = self._engine.on_cache(lambda cache: cache.pin(hashes, tenant.name, until_s))
        if not pinned.done:
            raise RequestError(
                f"the prefix has {amount(pinned.num_blocks, 'block')}; {pinned.num_pinned} are pinned and"
                f" {pinned.budget} may be (--pin-budget). Unpin another one first, or pin a shorter prefix.",
                field=_field(prefix),
            )
        return pinned

    def unpin(self, prefix: Prefix, tenant: Tenant = ALONE) -> int:
        """Let a pinned prefix be evicted in its turn; how many blocks nothing pins now. Raises NotFound for no pin."""
        hashes = self._own(prefix, tenant)
        free = self._engine.on_cache(lambda cache: cache.unpin(hashes[-1]))
        if free is None:
            raise NotFound("this prefix is not pinned; GET /v1/cache/tree shows what is", field=_field(prefix))
        return free

    def flush(self, prefix: Prefix | None = None, tenant: Tenant | None = None) -> Flushed:
        """Forget a prefix with all that continues it, all of a tenant (one that is given and no prefix), or everything.

        After it returns no new request hits older entries. Raises as `pin`.
        """
        if prefix is not None:
            last = self._own(prefix, tenant or ALONE)[-1]
            return self._engine.on_cache(lambda cache: cache.flush_prefix(last))
        served, owner = self._front.served, None if tenant is None else tenant.name
        served.recall.forget(owner)
        served.advisor.forget(owner)
        if tenant is not None:
            return self._engine.on_cache(lambda cache: cache.flush_tenant(tenant.name))
        return self._engine.flush()

    def tree(
        self, tenant: Tenant | None = None, start: BlockHash | None = None, limit: int = 100, order: Order = "used"
    ) -> tuple[tuple[Sight, ...], bool]:
        """The tree from the top down, at most `limit` nodes, and whether there are more. None: of all tenants.

        Between two steps at a time it works for a millisecond or so. Raises NotFound for a `start` that is unknown.
        """
        if start is not None and (tenant is None or start not in self._front.served.space.public):
            self._path(start, tenant)
        walk = Walk(owner=None if tenant is None else tenant.name, start=start, limit=limit, order=order)
        while self._engine.on_cache(lambda cache: cache.look(walk)):
            pass
        vocabulary, now = self._front.served.tokenizer.vocabulary, self._engine.now()
        idle = (None if n.last_used_s is None else max(0.0, now - n.last_used_s) for n in walk.nodes)
        sights = (Sight(n, spelled(vocabulary, n.begins), s) for n, s in zip(walk.nodes, idle, strict=True))
        return tuple(sights), walk.more

    def advice(self, tenant: Tenant | None = None) -> tuple[tuple[str, Advice], ...]:
        """What keeps ending the matches of a tenant, or of all, and what to change, each with its owner's name."""
        advisor, now = self._front.served.advisor, self._engine.now()
        owners = advisor.owners() if tenant is None else [tenant.name]
        return tuple((owner, said) for owner in owners for said in advisor.advice(owner, now))

    def waste(self) -> tuple[int, int]:
        """Spans that there is advice about, of all tenants, and the tokens that those cost in the last hour."""
        return self._front.served.advisor.waste(self._engine.now())

    def _own(self, prefix: Prefix, tenant: Tenant) -> tuple[BlockHash, ...]:
        """The blocks of a prefix that are the tenant's, at least one."""
        if isinstance(prefix, bytes):
            name = BlockHash(prefix)
            if name in self._front.served.space.public:
                raise RequestError(f"this block is public: it is {_PUBLIC}", field="block")
            return self._path(name, tenant)
        served = self._front.served
        ids = prefix if isinstance(prefix, tuple) else head_ids(prefix, served, tenant)
        chain = Chain(served.space, ids_of(ids, served), tenant=tenant)
        if len(chain.hashes) <= chain.first_private:
            raise RequestError(
                f"the prefix has {amount(len(chain), 'token')}, and all its full blocks are public: {_PUBLIC}"
                if chain.first_private
                else f"the prefix has {amount(len(chain), 'token')}; it must fill a block of {chain.block_size}",
                field=_field(prefix),
            )
        return tuple(chain.hashes[chain.first_private :])

    def _path(self, name: BlockHash, tenant: Tenant | None) -> tuple[BlockHash, ...]:
        """A block of this tenant, or of any, with all of its owner's that it continues. Raises NotFound."""
        owner = None if tenant is None else tenant.name
        hashes = self._engine.on_cache(lambda cache: cache.path(name, owner))
        if not hashes:
            raise NotFound("there is no such block", field="block")
        return hashes


def _field(prefix: Prefix) -> str:
    if isinstance(prefix, bytes):
        return "block"
    return field_of(prefix)
