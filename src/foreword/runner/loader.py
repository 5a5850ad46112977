"""From settings to a running model: find it, judge it, load it, size its memory, try it out.

`load_runner` is the one entry for the rooms above.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import nn

from foreword.base.config import CacheConfig, Config, ModelConfig
from foreword.base.errors import ConfigError, ModelRefused
from foreword.runner import elementwise, library, rowwise
from foreword.runner.account import open_account, plain_context
from foreword.runner.attention.backend import Ground
from foreword.runner.attention.call import LayerFacts
from foreword.runner.attention.choice import choose
from foreword.runner.attention.interface import attend
from foreword.runner.embedded import Progress, embedded, materialise, silent
from foreword.runner.fingerprint import ingredients, stamps
from foreword.runner.graphs import CudaRecorder
from foreword.runner.kinds import NotReusable, judge
from foreword.runner.layout import lay_out
from foreword.runner.memory import KVMemory, count_blocks
from foreword.runner.native import machine
from foreword.runner.plain import PlainRunner
from foreword.runner.products import PLAIN, listen, take_over
from foreword.runner.recorder import TapeRecorder
from foreword.runner.runner import ModelCard, ModelRunner
from foreword.runner.shelf import Shelf, cache_folder
from foreword.runner.survey import survey
from foreword.runner.trial import try_out, try_out_plain

_log = logging.getLogger(__name__)
_RECORDED_BYTES = 2**30
"""Weights of a model whose sizes of steps are recorded one by one; of a larger one's time Python takes little."""
_PATHS = "/", "./", "../", "~"
"""How a place on this machine begins, which a hub model's name never does."""
_R = TypeVar("_R", ModelRunner, PlainRunner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model in memory and where it came from."""

    name: str
    directory: Path | None
    """Local directory of its files; None when it was built in memory."""
    model: nn.Module


def load_runner(config: Config, progress: Progress = silent) -> ModelRunner | PlainRunner:
    """Load the model that the settings name and give it memory. Raises ModelRefused or ConfigError.

    A model whose prefixes cannot be reused gets a plain runner, and its card says why.
    """
    runner = _load(config, progress)
    few = replace(config, cache=replace(config.cache, kv_cache="32"))
    if isinstance(runner, PlainRunner):
        runner.load_again = lambda: _load_alike(few, PlainRunner)
    else:
        runner.load_again = lambda: _load_alike(few, ModelRunner)
    return runner


def _load(config: Config, progress: Progress) -> ModelRunner | PlainRunner:
    name, directory = find(config.model, progress)
    try:
        return _load_from(directory, name, config)
    except ModelRefused as error:
        if not directory.is_relative_to(cache_folder(config.model.cache_dir)):
            raise
        remedy = f"if files in {directory} are damaged, remove that folder: it is made again"
        raise ModelRefused(f"{error}; {remedy}") from error


def _load_from(directory: Path, name: str, config: Config) -> ModelRunner | PlainRunner:
    if (directory / "adapter_config.json").exists():
        raise ModelRefused(f"{name}: it comes with an adapter, which is not applied here; merge it into the weights")
    settings = library.read_config(str(directory))
    why, before = judge(name, settings), stamps(directory)
    runner: ModelRunner | PlainRunner | None = None
    if why is None:
        try:
            runner = equip(load(config.model, name, directory, settings), config.model, config.cache)
        except NotReusable as found:
            why = found.why
    if runner is None:
        loaded = load(config.model, name, directory, settings, attention=None)
        runner = equip_plain(loaded, config, str(why))
    if stamps(directory) != before:
        raise ModelRefused(f"{name}: its files were written to while they were read; try again")
    return runner


def _load_alike(config: Config, kind: type[_R]) -> _R:
    fresh = _load(config, silent)
    if not isinstance(fresh, kind):
        why = fresh.card.not_cacheable or "its prefixes can be reused"
        raise ConfigError(f"{fresh.card.name}: the model that is there now is of another kind ({why}); restart")
    return fresh


def load(
    config: ModelConfig,
    name: str,
    directory: Path,
    settings: library.Config,
    attention: str | None = library.ATTENTION_NAME,
) -> Loaded:
    """Load the weights; `attention` as in `library.load_weights`."""
    device = pick_device(config)
    library.register_attention(attend)
    model = library.load_weights(str(directory), pick_dtype(config, settings, device), attention)
    model.eval()
    model.requires_grad_(False)
    return Loaded(name=name, directory=directory, model=library.place(model, device))


def find(config: ModelConfig, progress: Progress = silent) -> tuple[str, Path]:
    """The model's name and the local directory of its files, converted or downloaded if need be."""
    path = Path(config.model).expanduser() if config.model else None
    if path is not None and path.is_dir():
        return path.resolve().name, path
    if path is not None and (path.exists() or str(config.model).startswith(_PATHS)):
        raise ModelRefused(
            f"{config.model} {'is a file; name the folder it is in' if path.exists() else 'is not there'}"
        )
    carried = embedded(config.model)
    if carried is not None:
        return carried.name, materialise(carried, cache_folder(config.cache_dir), progress)
    name = str(config.model)
    progress(f"Fetching {name}")
    return name, Path(library.snapshot(name))


def pick_device(config: ModelConfig) -> torch.device:
    """The device that the settings name. Raises ConfigError when it is not there."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no card; use --device cpu or auto")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def pick_dtype(config: ModelConfig, settings: library.Config, device: torch.device) -> torch.dtype:
    """The precision that the settings name; auto takes the checkpoint's where the device computes in it."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    saved = getattr(settings, "dtype", None)
    if device.type == "cuda" and saved in (torch.bfloat16, torch.float16):
        return torch.bfloat16 if saved == torch.bfloat16 and torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if saved == torch.bfloat16 and _cpu_has_bfloat16() else torch.float32


def equip(loaded: Loaded, config: ModelConfig, cache: CacheConfig) -> ModelRunner:
    """Give a loaded model its KV memory. Raises NotReusable when its layers do not fit, else as `load_runner`."""
    model = loaded.model
    with listen(model) as heard:
        facts = survey(loaded.name, model)
    card, weight = _card(loaded, config), next(model.parameters())  # before weights are laid out in another way
    shelf = Shelf(cache_folder(config.cache_dir) / "kernels")
    products, is_helped = PLAIN, False
    if weight.device.type == "cpu":
        is_helped = rowwise.take_over(model, shelf)
        elementwise.take_over(model)
        products = take_over(model, heard.families(), shelf)
    layout = lay_out(tuple(fact.shape for fact in facts), cache.block_size)
    num_blocks = count_blocks(cache, layout.span * weight.dtype.itemsize, weight.device)
    memory = KVMemory(layout, num_blocks, weight.dtype, weight.device)
    backend = choose(config.attention, Ground(facts=facts, memory=memory, exact=cache.exact, shelf=shelf))
    kernels = {
        "attention": backend.ingredient,
        "products": products.ingredient,
        "rowwise": "llvm 2" if is_helped else "torch 2",
    }
    card = replace(
        card,
        ingredients={**card.ingredients, **kernels},
        attention=backend.name,
        exact=products.exact and backend.exact,
        max_context=library.max_positions(library.config_of(model)),
        flops_per_token_and_key=sum(_flops_per_key(fact) for fact in facts),
    )
    follows = card.exact and not products.pads
    recorder = CudaRecorder() if weight.device.type == "cuda" else _tape_recorder(model, shelf, follows=follows)
    runner = ModelRunner(model, card, memory, backend, room=products.room, recorder=recorder)
    try_out(runner, model)
    return runner


def _tape_recorder(model: nn.Module, shelf: Shelf, *, follows: bool) -> TapeRecorder | None:
    """None where it does not pay or cannot be."""
    pays = follows or sum(parameter.nbytes for parameter in model.parameters()) <= _RECORDED_BYTES
    return TapeRecorder(shelf, follows=follows) if pays and machine.is_there() else None


def equip_plain(loaded: Loaded, config: Config, why: str) -> PlainRunner:
    """Serve a model one request a forward, and say so.

    Raises ModelRefused when it does not carry its own state, and ConfigError when a backend was asked for.
    """
    model, name = loaded.model, loaded.name
    if config.model.attention != "auto":
        raise ConfigError(
            f"attention is {config.model.attention}, but {name} is served with its own attention: {why};"
            " leave --attention out"
        )
    _log.warning("%s: prefixes are not reused, every prompt is computed whole: %s", name, why)
    library.copy_out(model)
    own = library.own_attention(model)
    try:
        account = open_account(name, model, config.cache, config.schedule)
        card = _card(loaded, config.model)
        card = replace(
            card,
            ingredients={**card.ingredients, "attention": f"plain 1, {own}"},
            attention=f"{own} (the model's own)",
            exact=next(model.parameters()).device.type == "cpu",
            max_context=plain_context(library.config_of(model), config.schedule.max_context),
            not_cacheable=why,
        )
        runner = PlainRunner(model, card, account)
        try_out_plain(runner, model)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ModelRefused(f"{name}: {why}; and one request a forward does not work either ({error})") from error
    return runner


def _card(loaded: Loaded, config: ModelConfig) -> ModelCard:
    """What is known of any model, before anything of it is replaced; how it computes is left to others."""
    model, settings = loaded.model, library.config_of(loaded.model)
    weight = next(model.parameters())
    computing = {"dtype": str(weight.dtype), "kv_dtype": str(weight.dtype)}
    return ModelCard(
        name=loaded.name,
        directory=str(loaded.directory or ""),
        device=weight.device.type,
        dtype=str(weight.dtype).removeprefix("torch."),
        attention="",
        exact=False,
        vocab_size=int(settings.vocab_size),
        max_context=0,
        end_ids=library.end_ids(model),
        num_parameters=sum(p.numel() for p in model.parameters()),
        flops_per_token=2 * _body_parameters(model),
        flops_per_token_and_key=0,
        ingredients=ingredients(model, loaded.directory, cache_folder(config.cache_dir) / "digests.json", computing),
    )


_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def _cpu_has_bfloat16() -> bool:
    """Whether the processor multiplies in bfloat16; where it does not, bfloat16 is slower than float32."""
    ask = getattr(torch.cpu, "get_capabilities", None)
    found: object = ask() if callable(ask) else {}
    able: Mapping[str, object] = cast("Mapping[str, object]", found) if isinstance(found, Mapping) else {}
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def _body_parameters(model: nn.Module) -> int:
    """Parameters that every token passes through: all but the tables of embeddings and of output logits."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = library.logits_layer(model)
    if head is not None:
        tables |= {id(parameter) for parameter in head.parameters()}
    return sum(p.numel() for p in model.parameters() if id(p) not in tables)


def _flops_per_key(fact: LayerFacts) -> int:
    return 2 * fact.heads * (fact.shape.key_dim + fact.shape.value_dim)
