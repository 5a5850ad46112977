"""The rules that no linter knows, each a function from a syntax tree to complaints: (line, what is wrong)."""

import ast
import re
import sys
from collections.abc import Callable, Iterator

Complaint = tuple[int, str]
Rule = Callable[[ast.Module], Iterator[Complaint]]

_PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
_READS_ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
_MUTABLE_LITERALS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_MUTABLE_CALLS = set(
    "list dict set bytearray defaultdict deque OrderedDict Counter ChainMap WeakValueDictionary WeakKeyDictionary"
    " Lock RLock Event Condition Semaphore Thread Queue SimpleQueue ThreadPoolExecutor ContextVar local"
    " Gauge Histogram Summary Info CollectorRegistry FastAPI APIRouter Console Random Generator".split()
)
_READ_ONLY_TYPES = {"Mapping", "Sequence", "Collection", "Set", "AbstractSet", "frozenset", "tuple", "Iterable"}
_EMPTY_WORDS = {"manager", "handler", "util", "utils", "common", "mixin", "helper", "helpers", "misc"}
_IMPURE = set(
    "asyncio concurrent contextvars ctypes datetime http io logging multiprocessing os pathlib queue random secrets"
    " selectors shutil signal socket sqlite3 ssl subprocess tempfile threading time urllib uuid warnings".split()
)


def no_environment(tree: ast.Module) -> Iterator[Complaint]:
    """Settings arrive as values. Only the rooms that start a process look at its environment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _READS_ENVIRONMENT and _is_name(node.value, "os"):
            yield node.lineno, f"os.{node.attr} outside cli and cluster"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in _READS_ENVIRONMENT:
                    yield node.lineno, f"os.{alias.name} outside cli and cluster"


def no_pickle(tree: ast.Module) -> Iterator[Complaint]:
    """Reading a pickle runs code; its bytes differ between Pythons."""
    for line, module in imports(tree):
        if module.split(".")[0] in _PICKLES:
            yield line, f"{module} is pickle"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in {"load", "save"} and _is_name(node.value, "torch"):
            yield node.lineno, f"torch.{node.attr} is pickle"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield node.value.lineno, "allow_pickle"


def no_module_level_mutables(tree: ast.Module) -> Iterator[Complaint]:
    """State has an owner. A constant table may be a dict when its annotation is a type that cannot be written to."""
    for node in _module_statements(tree.body):
        targets, value, read_only = _assignment(node)
        if value is None or read_only or targets == ["__all__"]:
            continue
        if isinstance(value, _MUTABLE_LITERALS) or _called_name(value) in _MUTABLE_CALLS:
            yield (
                node.lineno,
                f"module-level mutable {', '.join(targets)}; annotate a constant table as Mapping or Sequence",
            )
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"


def no_empty_words(tree: ast.Module) -> Iterator[Complaint]:
    """A name says what a thing is; manager, handler, utils and common say that nobody knew."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            # A function may find what two things have in common; a class or module that is "common" is a drawer.
            empty = _EMPTY_WORDS if isinstance(node, ast.ClassDef) else _EMPTY_WORDS - {"common"}
            for word in words(node.name) & empty:
                yield node.lineno, f"{node.name}: `{word}` is an empty word"


def only_pure_imports(tree: ast.Module) -> Iterator[Complaint]:
    """Standard library only, and of that nothing that tells time, draws, waits or touches the world."""
    for line, module in imports(tree):
        top = module.split(".")[0]
        if top == "foreword":
            continue
        if top not in sys.stdlib_module_names:
            yield line, f"{module} is not in the standard library"
        elif top in _IMPURE:
            yield line, f"{module} has effects"


def imports(tree: ast.Module) -> Iterator[Complaint]:
    """(line, module) of every import, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")


def words(name: str) -> set[str]:
    """`StepResult` and `step_result` are the words step and result."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def _module_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for field in ("body", "orelse", "finalbody"):
                yield from _module_statements(getattr(node, field, []))


def _assignment(node: ast.stmt) -> tuple[list[str], ast.expr | None, bool]:
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets], node.value, False
    if isinstance(node, ast.AnnAssign):
        outer = {child.id for child in ast.walk(node.annotation) if isinstance(child, ast.Name)}
        first = ast.unparse(node.annotation).removeprefix("Final[").split("[")[0].split(".")[-1]
        return [ast.unparse(node.target)], node.value, first in _READ_ONLY_TYPES or "TypeAlias" in outer
    return [], None, False


def _called_name(value: ast.expr) -> str | None:
    if not isinstance(value, ast.Call):
        return None
    func = value.func.value if isinstance(value.func, ast.Subscript) else value.func
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else None


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
