"""What an operator does to a running model: public heads, reload. One at a time, from any thread."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from threading import Lock

from foreword.base.errors import NotFound, RequestError, amount
from foreword.base.ids import BlockHash
from foreword.cache.identity import Chain, Space, Tenant
from foreword.engine.client import EngineClient
from foreword.front.ask import Conversation, field_of
from foreword.front.front import Front, Served, ids_of, read_prompt

_log = logging.getLogger(__name__)

Head = str | Conversation
"""A prompt, or the messages that conversations begin with, whose full blocks all tenants share."""


@dataclass(frozen=True, slots=True)
class PublicHead:
    """One head that is shared."""

    head: Head
    num_tokens: int
    num_blocks: int
    """Its full blocks; tokens beyond them are not shared."""


class Operator:
    """The one writer of what a front serves."""

    def __init__(
        self, front: Front, engine: EngineClient, load: Callable[[], Served], *, max_public_blocks: int
    ) -> None:
        """Begin without public heads.

        `load` runs on the engine's thread while nothing else does: it loads the weights again and says what is served
        from then on, or raises and leaves everything as it was.
        """
        self._front = front
        self._engine = engine
        self._load = load
        self._lock = Lock()
        self._heads: list[Head] = []
        self.max_public_blocks = max_public_blocks

    @property
    def heads(self) -> tuple[PublicHead, ...]:
        """What is shared now."""
        served = self._front.served
        return tuple(_measured(head, served) for head in tuple(self._heads))

    @property
    def num_public_blocks(self) -> int:
        """Blocks of all heads together; what two heads begin with counts once."""
        return len(self._front.served.space.public)

    def mark(self, head: Head) -> PublicHead:
        """From now on all tenants share the full blocks of this head. Marking it again changes nothing.

        Raises RequestError for a head of less than a block, or when the blocks of all heads would be too many.
        """
        with self._lock:
            served = self._front.served
            measured = _measured(head, served)
            if not measured.num_blocks:
                raise RequestError(
                    f"the head has {amount(measured.num_tokens, 'token')}, less than a block of"
                    f" {served.space.block_size}: there is nothing to share; make it longer or leave it out",
                    field=field_of(head),
                )
            if head in self._heads:
                return measured
            public = _public([*self._heads, head], served)
            if len(public) > self.max_public_blocks:
                raise RequestError(
                    f"the head has {amount(measured.num_blocks, 'block')}; with it public heads would have"
                    f" {len(public)}, and {self.max_public_blocks} are allowed, a quarter of the pool."
                    " Remove another one first.",
                    field=field_of(head),
                )
            self._engine.share(public)  # first the cache, or the first to compute the head could not store it
            self._heads.append(head)
            self._front.served = replace(served, space=replace(served.space, public=public))
            return measured

    def unmark(self, head: Head) -> int:
        """Share this head no longer, and forget its blocks with all that continues them. Blocks that were dropped.

        Raises NotFound when it was not shared.
        """
        with self._lock:
            if head not in self._heads:
                raise NotFound("this head is not public", field=field_of(head))
            self._heads.remove(head)
            served = self._front.served
            public = _public(self._heads, served)
            self._front.served = replace(served, space=replace(served.space, public=public))
            return self._engine.share(public)

    def reload(self) -> BlockHash:
        """Load the weights again, once the requests under way are done, and begin with an empty cache; the new root.

        Requests that come meanwhile are refused with Unavailable. Raises what loading raises; the old model goes on
        then as if nothing had been tried.
        """
        with self._lock:
            return self._engine.reload(self._swap)

    def _swap(self) -> BlockHash:
        loaded = self._load()
        # From here on nothing may fail: the new weights are there.
        self._heads = [head for head in self._heads if _still_fits(head, loaded)]
        public = _public(self._heads, loaded)
        self._engine.share(public)
        self._front.served = replace(loaded, space=replace(loaded.space, public=public))
        return loaded.space.root


def head_ids(head: Head, served: Served, tenant: Tenant | None = None) -> tuple[int, ...]:
    """The tokens of a head; of messages, those that stay the same whatever a user says next. Raises RequestError.

    As `tenant` sends it, with the answers that it got; None: as anybody does. A template or a tokenizer that makes the
    same of two different words does not show where a user's begin, and then nobody can say what the head is.
    """

    def ids(prompt: Head) -> tuple[int, ...]:
        return ids_of(prompt, served) if tenant is None else read_prompt(prompt, served, tenant).ids

    if isinstance(head, str):
        return ids(head)
    users = ({"role": "user", "content": text} for text in ("a", "0"))
    one, other = (ids(Conversation((*head.messages, user), head.tools)) for user in users)
    if one == other:
        raise RequestError(
            "this model's template or tokenizer does not show where a user's next words begin; name the prefix as text"
            " or ids",
            field=field_of(head),
        )
    return one[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))]


def _measured(head: Head, served: Served) -> PublicHead:
    num_tokens = len(head_ids(head, served))
    return PublicHead(head, num_tokens, num_tokens // served.space.block_size)


def _public(heads: Sequence[Head], served: Served) -> frozenset[BlockHash]:
    """Hashes of the full blocks of all heads, as chains without a salt have them."""
    plain = Space(served.space.root, served.space.block_size)
    return frozenset(name for head in heads for name in Chain(plain, head_ids(head, served)).hashes)


def _still_fits(head: Head, served: Served) -> bool:
    try:
        head_ids(head, served)
    except RequestError as error:
        _log.warning("a head is public no longer, since the reloaded model cannot read it: %s", error)
        return False
    return True
