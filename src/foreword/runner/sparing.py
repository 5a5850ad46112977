"""What `transformers` imports for uses that a server does not have, left out of a start: 0.8 s of it.

Two things bring them in (5.24 with PyTorch 2.13): tensors that several machines share, and `torch._dynamo`, in which
functions are marked for models that are compiled and of which masks take one class. The library does without the first
where PyTorch was built without them, so it is told that this one was. In place of the second there is a stand-in: it
marks nothing, since nothing here compiles a model, and steps back for good when it is asked for anything else.

Other users of the library in the same process might share or compile: it is for the command line.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from threading import Lock
from types import ModuleType

import torch

_NAME = "_dynamo"
_PACKAGE = f"torch.{_NAME}"
_MASKS, _CLASS = f"{_PACKAGE}._trace_wrapped_higher_order_op", "TransformGetItemToIndex"
_MARKS = "allow_in_graph", "assume_constant_result", "disable"
_QUESTION = "is_torch_distributed_available"
_ASKED = "transformers.utils.import_utils", "transformers.utils"


def spare() -> None:
    """Spare the process what it need not import for a model. What was imported before stays."""
    for module in _ASKED:
        names = vars(import_module(module))
        if _QUESTION in names:
            names[_QUESTION] = _not_available
    package = None if _PACKAGE in sys.modules else find_spec(_PACKAGE)
    masks = None if package is None else PathFinder.find_spec(_MASKS, package.submodule_search_locations)
    if package is not None and masks is not None:
        _Understudy(package, masks).step_in()


class _Understudy:
    """Modules in the places of others, until one of those is needed; finds modules in the package among them."""

    def __init__(self, package: ModuleSpec, masks: ModuleSpec) -> None:
        self._lock = Lock()
        self._modules = {
            _PACKAGE: _StandIn(package, dict.fromkeys(_MARKS, _unmarked), self.step_back),
            _MASKS: _StandIn(masks, {_CLASS: self._mode}, self.step_back),
        }

    def step_in(self) -> None:
        """Take the places."""
        sys.modules.update(self._modules)
        setattr(torch, _NAME, self._modules[_PACKAGE])
        sys.meta_path.insert(0, self)

    def step_back(self) -> None:
        """Leave the places that nobody has taken since."""
        with self._lock:
            for name, module in self._modules.items():
                if sys.modules.get(name) is module:
                    del sys.modules[name]
            if vars(torch).get(_NAME) is self._modules[_PACKAGE]:
                delattr(torch, _NAME)
            if self in sys.meta_path:
                sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Whoever looks for a part of the package needs the package; see `importlib.abc.MetaPathFinder`."""
        del path, target
        if not name.startswith(f"{_PACKAGE}."):
            return None
        self.step_back()
        import_module(_PACKAGE)
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if isinstance(spec, ModuleSpec):  # Python would load by it, once more, what has come with the package
            spec.loader = _Loaded(sys.modules[name], spec)
            return spec
        return None

    def _mode(self) -> object:
        """An object of the real class."""
        self.step_back()
        return getattr(import_module(_MASKS), _CLASS)()


class _StandIn(ModuleType):
    """A module with a few names, which has the real one imported when it is asked for another."""

    def __init__(self, spec: ModuleSpec, parts: Mapping[str, object], step_back: Callable[[], None]) -> None:
        super().__init__(spec.name)
        vars(self).update(parts)
        self.__spec__, self.__file__ = spec, spec.origin
        if spec.submodule_search_locations is not None:
            self.__path__ = spec.submodule_search_locations
        self._step_back = step_back

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        self._step_back()
        return getattr(import_module(self.__name__), name)


class _Loaded(Loader):
    """In the place of a module's loader until somebody loads it, who gets the module that is there."""

    def __init__(self, module: ModuleType, spec: ModuleSpec) -> None:
        self._module, self._spec, self._loader = module, spec, spec.loader

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See `importlib.abc.Loader`."""
        del spec
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib.abc.Loader`."""
        del module
        self._spec.loader = self._loader


def _unmarked(fn: Callable[..., object] | None = None, *how: object, **more: object) -> Callable[..., object]:
    """A function as it is. It is called as PyTorch's own are, with settings alone too, for what marks a function."""
    del how, more
    return _unmarked if fn is None else fn


def _not_available() -> bool:
    return False
