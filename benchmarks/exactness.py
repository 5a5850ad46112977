"""What exactness costs: the same work by the runner as it serves and by runners without its rules.

    python benchmarks/exactness.py                  wants an otherwise idle machine
    python benchmarks/exactness.py --only exact,plain --cases crowd --repeats 6

    exact     as served: products by our own kernel where the processor has tile registers, else in portions of proven
              sizes with steps padded; attention that is exact by itself
    plain     torch's linear layers as they are, nothing padded
    packed    the same with weights that oneDNN has laid out, each product whole
    free      as plain, with torch's attention (sdpa) over products of just as many rows as there are
    attention linear layers as in exact, attention as in free

The work: `crowd` is 32 prompts at once over four heads, answered with 32 tokens each; `turns` is four users with six
growing turns of 24 tokens. Variants take turns, so that a machine whose speed drifts treats them alike. What is printed
is the median time of each, and what exact costs against the fastest of the others.
"""

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from foreword import LLM
from foreword.runner import loader
from foreword.runner.attention import heights, sdpa
from foreword.runner.attention.tiles import TILE
from foreword.runner.linear import Matrix, pack
from foreword.runner.products import PLAIN, Products, take_over

Work = Callable[[LLM, int], None]
FREE = heights.Heights(allowed=tuple(range(1, TILE + 1)), grouped=1, exact=False)
"""Each product has just as many rows as there are."""


class Whole(nn.Module):
    """A linear layer whose weight oneDNN has laid out; takes all rows in one product."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias, self.inputs = linear.weight, linear.bias, linear.in_features
        self.matrix = Matrix(linear.weight, pack(linear.weight))

    def forward(self, x: Tensor) -> Tensor:
        """Take x [..., in] to [..., out]."""
        rows = x.reshape(-1, self.inputs)
        out = self.matrix.product(rows, "packed")
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], -1)


def leave(model: nn.Module, families: Iterable[Sequence[nn.Linear]]) -> Products:
    """Replace nothing, promise nothing."""
    del model, families
    return PLAIN


def lay_out(model: nn.Module, families: Iterable[Sequence[nn.Linear]]) -> Products:
    """Put a `Whole` in the place of each linear layer; promise nothing."""
    del families
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Whole(child))
    return PLAIN


LINEARS: Mapping[str, Callable[[nn.Module, Iterable[Sequence[nn.Linear]]], Products]] = {
    "exact": take_over,
    "plain": leave,
    "packed": lay_out,
    "free": leave,
    "attention": take_over,
}

TORCH_ATTENTION = ("free", "attention")
"""Variants with torch's attention, unconfined."""


@contextmanager
def ruled(name: str) -> Iterator[None]:
    """Without the rules that a variant drops."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(loader, "take_over", LINEARS[name]))
        if name in TORCH_ATTENTION:
            stack.enter_context(
                patch.object(sdpa, "heights_by_layer", lambda facts, *_, **__: {f.layer: FREE for f in facts})
            )
        yield


def ids(count: int, seed: object) -> list[int]:
    """Token ids; equal seeds give equal ones."""
    return random.Random(str(seed)).choices(range(1000, 40_000), k=count)


def crowd(llm: LLM, seed: int) -> None:
    """32 prompts of 530 to 560 tokens at once, eight over each head."""
    heads = [ids(500, (seed, head)) for head in range(4)]
    prompts = [[*heads[i % 4], *ids(30 + i, (seed, "tail", i))] for i in range(32)]
    llm.generate(prompts, max_tokens=32, ignore_eos=True)


def turns(llm: LLM, seed: int) -> None:
    """Four users over one system prompt of 300 tokens."""
    system = ids(300, (seed, "system"))

    def user(number: int) -> None:
        history = list(system)
        for turn in range(6):
            history += ids(40, (seed, number, turn))
            history += llm.generate(history, max_tokens=24, ignore_eos=True)[0].token_ids

    threads = [threading.Thread(target=user, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


CASES: Mapping[str, Work] = {"crowd": crowd, "turns": turns}


def measure(names: list[str], cases: list[str], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by case and variant."""
    found = {case: {name: list[float]() for name in names} for case in cases}
    with ExitStack() as stack:
        llms: dict[str, LLM] = {}
        for name in names:
            with ruled(name):
                attention = "sdpa" if name in TORCH_ATTENTION else "auto"
                llms[name] = stack.enter_context(LLM(device="cpu", kv_cache="600", attention=attention))
        for repeat in range(-1, repeats):  # the first one warms up
            for case in cases:
                for name in random.sample(names, len(names)):
                    with ruled(name):
                        llms[name].assembly.worker.flush()
                        start = time.perf_counter()
                        CASES[case](llms[name], repeat)
                        if repeat >= 0:
                            found[case][name].append(time.perf_counter() - start)
    return found


def main() -> None:
    """Measure and print one JSON object a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(LINEARS), help="variants, by commas")
    parser.add_argument("--cases", default=",".join(CASES), help="by commas")
    parser.add_argument("--repeats", type=int, default=5)
    wish = parser.parse_args()
    names, cases = wish.only.split(","), wish.cases.split(",")
    if strange := set(cases) - set(CASES):
        sys.exit(f"there is no case {', '.join(sorted(strange))}; choose from {', '.join(CASES)}")
    if unknown := set(names) - set(LINEARS):
        sys.exit(f"there is no variant {', '.join(sorted(unknown))}; choose from {', '.join(LINEARS)}")
    for case, times in measure(names, cases, wish.repeats).items():
        medians = {name: round(statistics.median(seconds), 3) for name, seconds in times.items()}
        row: dict[str, Any] = {"case": case, "seconds": medians}
        others = [seconds for name, seconds in medians.items() if name != "exact"]
        if "exact" in medians and others:
            row["exact_costs_percent"] = round(100 * (medians["exact"] / min(others) - 1), 1)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
