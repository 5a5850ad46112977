"""Memory that is lent comes back by itself, and no sooner."""

import torch

from foreword.runner.lender import Lender


def test_what_is_lent_looks_as_asked() -> None:
    lender = Lender()
    for wanted in (torch.empty(3, 5), torch.empty(4, 6, dtype=torch.bfloat16).t(), torch.empty(2, 8)[:, :3]):
        lent = lender.like(wanted)
        assert (lent.shape, lent.stride(), lent.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
        assert lent.data_ptr() % 64 == 0
    nothing = torch.empty(0, 4)
    assert lender.like(nothing) is nothing


def test_memory_is_lent_again_when_nobody_looks_at_it() -> None:
    lender = Lender()
    first = lender.like(torch.empty(100))
    place, view = first.data_ptr(), first[10:]
    del first
    assert lender.like(torch.empty(100)).data_ptr() != place, "somebody looks at a part of it"
    before = lender.num_bytes
    del view
    assert lender.like(torch.empty(120)).data_ptr() == place, "as large, rounded up"
    assert lender.num_bytes == before


def test_a_lasting_look_holds_nothing() -> None:
    lender = Lender()
    lent = lender.like(torch.empty(4, 4))
    lent.copy_(torch.arange(16.0).view(4, 4))
    part = lender.lasting(lent.t()[1:, 2])
    assert torch.equal(part, lent.t()[1:, 2])
    place = lent.data_ptr()
    assert lender.lends(place)
    del lent
    other = lender.like(torch.empty(4, 4))
    assert other.data_ptr() == place
    other.fill_(7)
    assert part.tolist() == [7, 7, 7]
    own = torch.empty(4)
    assert lender.lasting(own) is own
    assert not lender.lends(own.data_ptr())
