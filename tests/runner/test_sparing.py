"""What a start leaves out: the same answers without it, and the real thing for whoever asks for it."""

import json
import subprocess
import sys

import pytest

WATCH = """
import sys, torch
from collections import Counter
executed = Counter()
def watch(event, given):
    if event == "exec" and given[0].co_name == "<module>" and "/torch/_dynamo/" in given[0].co_filename:
        executed[given[0].co_filename] += 1
sys.addaudithook(watch)
"""

PRELUDE = """
from foreword.runner import sparing
sparing.spare()
assert type(torch._dynamo).__name__ == "_StandIn"
"""

POSTLUDE = """
import torch._dynamo
package = sys.modules["torch._dynamo"]
assert package is torch._dynamo and package.__spec__.origin.endswith("__init__.py")
assert len(executed) > 50 and set(executed.values()) == {1}, executed.most_common(2)
for name, module in list(sys.modules.items()):
    if name.startswith("torch._dynamo"):
        assert not type(module).__module__.startswith("foreword"), name
        assert module.__spec__.name == name and module.__spec__.loader.get_code(name), name
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("foreword")]
seen = []
def backend(graph, inputs):
    seen.append(graph)
    return graph.forward
double = torch.compile(lambda x: x * 2, backend=backend)
assert double(torch.ones(2)).tolist() == [2, 2]
assert len(seen) == 1
print("real")
"""

WAYS = {
    "a name of the package": "assert torch._dynamo.config.recompile_limit > 0",
    "a name from the package": "from torch._dynamo import config; assert config.recompile_limit > 0",
    "a function": "torch.compiler.reset()",
    "a part that comes with it": "import torch._dynamo.eval_frame; assert torch._dynamo.eval_frame.OptimizedModule",
    "a name from such a part": "from torch._dynamo.eval_frame import OptimizedModule",
    "a part that does not come with it": "import torch._dynamo.testing; assert torch._dynamo.testing.CompileCounter",
    "a part that is not there": """
try:
    import torch._dynamo.nothing
except ModuleNotFoundError as error:
    assert error.name == "torch._dynamo.nothing"
else:
    raise AssertionError
""",
    "another name of the part with the class": """
from torch._dynamo._trace_wrapped_higher_order_op import trace_wrapped
assert trace_wrapped.__module__ == "torch._dynamo._trace_wrapped_higher_order_op"
""",
    "where its parts lie, which needs none of them": """
from importlib.util import find_spec
assert find_spec("torch._dynamo").origin.endswith("__init__.py")
assert find_spec("torch._dynamo._trace_wrapped_higher_order_op").origin.endswith(".py")
assert not executed
torch._dynamo.reset()
""",
    "where a part lies that comes with it": """
from importlib.util import find_spec, module_from_spec
for _ in range(2):
    spec = find_spec("torch._dynamo.eval_frame")
    assert spec.origin.endswith("eval_frame.py") and spec.loader.get_source(spec.name)
import torch._dynamo.eval_frame
assert torch._dynamo.eval_frame.__spec__ is find_spec("torch._dynamo.eval_frame")
""",
    "all names": "from torch._dynamo import *; assert OptimizedModule",
    "many at once": """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
sys.setswitchinterval(1e-5)
barrier = Barrier(8)
def ask(i):  # not for parts: with several threads PyTorch itself trips over its circles
    barrier.wait()
    return torch._dynamo.config.recompile_limit
with ThreadPoolExecutor(8) as pool:
    assert len(set(pool.map(ask, range(8)))) == 1
""",
    "the class": """
from transformers.masking_utils import TransformGetItemToIndex
assert type(torch._dynamo).__name__ == "_StandIn"
with TransformGetItemToIndex() as mode:
    assert torch.arange(3)[torch.tensor(1)].item() == 1
assert type(mode).__module__ == "torch._dynamo._trace_wrapped_higher_order_op"
""",
    "nothing, after functions were marked": """
assert torch.compiler.allow_in_graph(len) is len
assert torch.compiler.disable(recursive=False)(len) is len
assert torch._dynamo.disable(fn=len) is torch._dynamo.allow_in_graph(fn=len) is len
assert torch.compiler.disable(len, recursive=False, reason="none") is len
assert type(torch._dynamo).__name__ == "_StandIn"
torch._dynamo.reset()
""",
}


def run(*parts: str) -> str:
    command = [sys.executable, "-c", "\n".join(parts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("way", WAYS)
def test_who_asks_for_more_gets_the_real_thing_once(way: str) -> None:
    assert run(WATCH, PRELUDE, WAYS[way], POSTLUDE) == "real\n"


def test_what_is_there_already_stays() -> None:
    before = "import torch._dynamo\nfrom foreword.runner import sparing\nsparing.spare()"
    assert run(WATCH, before, POSTLUDE) == "real\n"


SERVED = """
import json, sys
HEAVY = "torch._dynamo.eval_frame", "torch.distributed.tensor", "torch._inductor"
from foreword.cli.libraries import import_libraries
from foreword.runner import sparing
if sys.argv[-1] == "plain":
    sparing.spare = lambda: None
import_libraries()
from foreword import LLM
with LLM(kv_cache="64") as llm:
    answers = [llm.generate("Once upon a " + end, max_tokens=8, logprobs=3)[0] for end in ("time", "time", "hill")]
heavy = [name for name in HEAVY if name in sys.modules]
print(json.dumps([repr([(a.token_ids, a.logprobs) for a in answers]), heavy, len(sys.modules)]))
"""


def served(how: str) -> tuple[str, list[str], int]:
    command = [sys.executable, "-c", SERVED, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


def test_answers_are_the_same_and_a_part_of_the_modules_is_not_imported() -> None:
    plain, spared = served("plain"), served("spared")
    assert plain[0] == spared[0]
    assert plain[1] == ["torch._dynamo.eval_frame", "torch.distributed.tensor", "torch._inductor"]
    assert spared[1] == []
    assert spared[2] < plain[2] - 250
