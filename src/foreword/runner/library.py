"""The doors to `transformers`: every call this room makes into it, with types.

The library is loosely typed and renames things between releases; here its answers become plain values, so that the
rest of the room reads like typed code and a rename is mended in one place.
"""

import inspect
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, cast

import huggingface_hub
import tokenizers
import torch
import transformers
from huggingface_hub import errors
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as _logging

from foreword.base.errors import ModelRefused

ATTENTION_NAME = "foreword"
"""Our name among the library's attention functions. The library gives meaning to parts of names such as "flash" or
"sdpa", and builds masks for names that it knows; this one says nothing to it, so no mask is built."""

VERSION: str = transformers.__version__

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""What releases call the cache that a forward takes and gives back, newest first."""

_WANTED = ("*.json", "*.safetensors", "*.safetensors.index.json", "*.model", "*.txt", "*.jinja", "tokenizer*")
"""Files of a hub model that are fetched: safetensors, never pickles."""

Config = Any
"""A `PreTrainedConfig`; its fields differ from model to model, so they are read with `getattr` and a default."""


def register_attention(function: Callable[..., object]) -> None:
    """Make `function` what models run when their attention is called ATTENTION_NAME."""
    cast(Any, AttentionInterface).register(ATTENTION_NAME, function)


@contextmanager
def quiet() -> Generator[None]:
    """Silence the library's progress bars and warnings while a model loads; restores both."""
    level = _logging.get_verbosity()
    bars = _logging.is_progress_bar_enabled()
    _logging.set_verbosity_error()
    _logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _logging.set_verbosity(level)
        if bars:
            _logging.enable_progress_bar()


def snapshot(model: str) -> str:
    """The local folder of a hub model, downloaded if need be. Raises ModelRefused when it cannot be had.

    The hub client heeds its own settings (offline mode, token, cache folder).
    """
    try:
        return cast(str, cast(Any, huggingface_hub).snapshot_download(model, allow_patterns=list(_WANTED)))
    except errors.GatedRepoError as error:
        raise ModelRefused(f"{model}: the hub gives it only to those who have accepted its terms") from error
    except (errors.HFValidationError, errors.RepositoryNotFoundError) as error:
        raise ModelRefused(f"{model} is neither a directory here nor a hub model's name") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        why = "a hub model that was fetched before, and the hub cannot be reached"
        raise ModelRefused(f"{model} is neither a directory here nor {why}") from error
    except Exception as error:  # the client, the network and the hub each raise their own
        raise ModelRefused(
            f"{model} is neither a directory here nor a hub model that can be had: {_first_line(error)}"
        ) from error


def read_config(model: str) -> Config:
    """The configuration of a local directory or hub id. Raises ModelRefused when it cannot be had."""
    try:
        return cast(Any, AutoConfig).from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # the library, the hub client and the network each raise their own
        raise ModelRefused(f"{model}: {_first_line(error)}") from error


def text_config(config: Config) -> Config:
    """The part of a configuration that describes the decoder."""
    return config.get_text_config(decoder=True)


def layer_kinds(config: Config) -> tuple[str, ...]:
    """What each layer of the decoder keeps ("full_attention", "conv", ...), in order.

    Raises LookupError when the library cannot say: its function is not a stable one.
    """
    try:
        from transformers import cache_utils

        types, _ = cast(Any, cache_utils).get_layer_types_and_kwargs(text_config(config))
        return tuple(str(kind) for kind in types)
    except Exception as error:
        raise LookupError(_first_line(error)) from error


def causal_class(config: Config) -> type[nn.Module] | None:
    """The class that would be built for a configuration, or None when the library has no causal model for it."""
    try:
        found = cast(Any, transformers.MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]
    except KeyError:
        return None
    return cast("type[nn.Module]", found[0] if isinstance(found, tuple) else found)


def routes_attention(model_class: type[nn.Module]) -> bool:
    """Whether the class calls its attention through the library's interface, so that ours can take its place."""
    ask = getattr(model_class, "_can_set_attn_implementation", None)
    return bool(ask()) if callable(ask) else False


def activations() -> frozenset[type[nn.Module]]:
    """Classes of the modules that models compute single numbers with."""
    named = cast("Mapping[str, Any]", cast(Any, transformers).activations.ACT2CLS)
    return frozenset(
        cast("type[nn.Module]", entry[0] if isinstance(entry, tuple) else entry) for entry in named.values()
    )


def forward_takes(model_class: type[nn.Module], argument: str) -> bool:
    """Whether the class's forward names an argument. A forward that does not would swallow and ignore it."""
    return argument in inspect.signature(model_class.forward).parameters


def cache_argument(model_class: type[nn.Module]) -> str | None:
    """What the class's forward calls the cache that it takes; None if it takes none."""
    return next((name for name in _CACHE_NAMES if forward_takes(model_class, name)), None)


def load_weights(model: str, dtype: torch.dtype, attention: str | None = ATTENTION_NAME) -> nn.Module:
    """Build the model from a local directory or hub id. Raises ModelRefused.

    `attention` is ours, or one of the library's; None leaves the choice to the library. On a CPU weights may still lie
    in the files: see `copy_out`.
    """
    chosen = {} if attention is None else {"attn_implementation": attention}
    try:
        with quiet():
            loaded = cast(Any, AutoModelForCausalLM).from_pretrained(
                model, dtype=dtype, trust_remote_code=False, **chosen
            )
    except Exception as error:
        raise ModelRefused(f"{model}: {_first_line(error)}") from error
    return cast(nn.Module, loaded)


def copy_out(model: nn.Module) -> None:
    """Copy what lies in files on a CPU into memory of its own, but for weights that were copied in laying them out.

    Mapped numbers would change under a running model, and its cache, when somebody writes into a file.
    """
    for numbers in (*model.parameters(), *model.buffers()):
        if numbers.device.type == "cpu":
            numbers.data = numbers.data.clone()


def place(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device, unless it is there. Raises ModelRefused when it cannot be moved or does not fit."""
    if all(parameter.device.type == device.type for parameter in model.parameters()):
        return model
    try:
        return model.to(device)
    except (ValueError, RuntimeError) as error:
        raise ModelRefused(f"{type(model).__name__} cannot be put on {device}: {_first_line(error)}") from error


def use_attention(model: nn.Module, name: str = ATTENTION_NAME) -> None:
    """Switch a model that is already built to an attention function by name: ours, or one of the library's."""
    cast(Any, model).set_attn_implementation(name)


def called_in_forward(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """The module-level function that a module's forward calls by this name; None if there is none."""
    theirs = inspect.unwrap(type(module).forward)
    return theirs.__globals__.get(name) if name in theirs.__code__.co_names else None


def replace_in_forward(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Let this one module's forward call `function` by that name; its class and all other models go on as before."""
    theirs = inspect.unwrap(type(module).forward)
    named = {**theirs.__globals__, name: function}
    ours = FunctionType(theirs.__code__, named, theirs.__name__, theirs.__defaults__, theirs.__closure__)
    ours.__kwdefaults__ = theirs.__kwdefaults__
    module.forward = MethodType(ours, module)


def forward(model: nn.Module, ids: Tensor, positions: Tensor, **arguments: object) -> Tensor:
    """One forward pass without the library's cache. ids and positions [1, T] -> logits [rows, vocabulary]."""
    output = cast(Any, model)(input_ids=ids, position_ids=positions, use_cache=False, **arguments)
    return cast(Tensor, output.logits)[0]


def forward_with_cache(model: nn.Module, ids: Tensor, positions: Tensor, cache: object) -> tuple[Tensor, object]:
    """One forward pass that goes on from a cache of the model's own; None begins one.

    ids and positions [1, T] -> logits of the last row [vocabulary], and the cache, which may be the same object.
    Raises LookupError when the model gives none back.
    """
    arguments: dict[str, object] = {}
    kind = type(model)
    name = cache_argument(kind)
    if cache is not None and name is not None:
        arguments[name] = cache
    if forward_takes(kind, "position_ids"):
        arguments["position_ids"] = positions
    if forward_takes(kind, "logits_to_keep"):
        arguments["logits_to_keep"] = 1
    output = cast(Any, model)(input_ids=ids, use_cache=True, **arguments)
    given = next((output[name] for name in _CACHE_NAMES if name in output and output[name] is not None), None)
    if given is None:
        raise LookupError(f"{kind.__name__} gives no cache back from its forward")
    return cast(Tensor, output.logits)[0, -1], given


def cache_bytes(cache: object) -> int:
    """Bytes of all tensors that a cache object holds."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(cache, set()))


def _tensors(value: object, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor in an object, its attributes and containers, each once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: Iterable[object] = ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        inner = cast("Mapping[object, object]", value).values()
    elif isinstance(value, (list, tuple)):
        inner = cast("list[object]", value)
    elif hasattr(value, "__dict__"):
        inner = vars(value).values()
    for item in inner:
        yield from _tensors(item, seen)


def own_attention(model: nn.Module) -> str:
    """The name of the attention function that a model runs."""
    return str(getattr(config_of(model), "_attn_implementation", None) or "its own")


def config_of(model: nn.Module) -> Config:
    """A model's configuration."""
    return cast(Any, model).config


def end_ids(model: nn.Module) -> frozenset[int]:
    """Token ids that end an answer, from the generation settings, else from the configuration."""
    generation = cast("GenerationConfig | None", getattr(model, "generation_config", None))
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(text_config(config_of(model)), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(cast("list[int]", found)) if isinstance(found, (list, tuple)) else frozenset({int(found)})


def known_positions(config: Config) -> int | None:
    """Positions that the model knows; None when its configuration names no limit."""
    for field in ("max_position_embeddings", "n_positions", "max_seq_len"):
        found = getattr(config, field, None)
        if isinstance(found, int):
            return found
    return None


def max_positions(config: Config) -> int:
    """Positions that the model knows. Raises ModelRefused when the configuration does not say."""
    known = known_positions(config)
    if known is None:
        raise ModelRefused(f"{type(config).__name__} does not say how many positions the model knows")
    return known


def logits_layer(model: nn.Module) -> nn.Module | None:
    """The layer that makes logits, if the model names one."""
    return cast("nn.Module | None", cast(Any, model).get_output_embeddings())


def config_fields(config: Config) -> Mapping[str, Any]:
    """Every field of a configuration, defaults included, as JSON values."""
    return cast("Mapping[str, Any]", config.to_dict())


def convert_gguf(folder: str, file: str, target: str) -> None:
    """Read a GGUF and write what it holds as an ordinary bfloat16 model directory with its tokenizer.

    The library dequantises while reading, then still believes the model to be quantised and refuses to save it; the
    quantiser is taken off because the weights are dense by then. Raises ModelRefused when they are not.
    """
    with quiet(), _no_bar_of_its_own():
        model = cast(Any, AutoModelForCausalLM).from_pretrained(folder, gguf_file=file, dtype=torch.bfloat16)
        if not all(weight.is_floating_point() for weight in model.parameters()):
            raise ModelRefused(f"{file}: its weights stayed packed; only dense ones can be converted")
        model.hf_quantizer = None
        model.is_quantized = False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(target)
        tokenizer = cast(Any, AutoTokenizer).from_pretrained(folder, gguf_file=file)
        tokenizer.save_pretrained(target)


@contextmanager
def _no_bar_of_its_own() -> Generator[None]:
    """Silence the bar that reading a GGUF draws past the library's own switch."""
    from transformers import modeling_gguf_pytorch_utils

    reader = cast(Any, modeling_gguf_pytorch_utils)
    before, reader.tqdm = getattr(reader, "tqdm", None), _unseen
    try:
        yield
    finally:
        reader.tqdm = before


def _unseen(items: Iterable[object], *arguments: object, **further: object) -> Iterable[object]:
    del arguments, further
    return items


def encode(file: Path, text: str) -> tuple[int, ...]:
    """Ids of a text by a `tokenizer.json`, with what it puts around a plain prompt."""
    return tuple(cast("list[int]", cast(Any, tokenizers).Tokenizer.from_file(str(file)).encode(text).ids))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
