"""`foreword demo` and `foreword identity` on the embedded model."""

import json

import pytest

from tests.cli.conftest import Cli

SMALL = ("--prefix-tokens", "70", "--requests", "3", "--max-tokens", "1", "--kv-cache", "64")


def test_the_experiment_in_numbers(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("demo", "--json", *SMALL) == 0
    report = json.loads(capsys.readouterr().out)
    cold, *warm = report["requests"]
    assert report["prefix_tokens"] == 70
    assert cold["cached_tokens"] == 0
    assert [one["cached_tokens"] >= 64 for one in warm] == [True, True]
    for one in report["requests"]:
        assert one["cached_tokens"] + one["computed_tokens"] == one["prompt_tokens"]
        assert one["completion_tokens"] == 1
    prompts = sum(one["prompt_tokens"] for one in report["requests"])
    assert report["hit_rate"] == pytest.approx(sum(one["cached_tokens"] for one in warm) / prompts)
    assert 0 < report["prefill_flops_saved"] < report["prefill_flops"]
    growth = (70 + report["suffix_tokens"]) / report["suffix_tokens"]
    assert report["speedup_linear"] == pytest.approx(growth)
    assert report["speedup_quadratic"] == pytest.approx(growth**2)
    assert report["speedup"] == pytest.approx(report["cold_ttft_s"] / report["warm_ttft_s"])


def test_the_table(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("demo", "--no-cache", *SMALL) == 0
    out = capsys.readouterr().out
    assert "one prefix of 70 tokens" in out
    assert "hit rate" in out
    assert "0.0% of all prompt tokens" in out


def test_a_prefix_longer_than_the_context(cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli("demo", "--prefix-tokens", "2000", "--kv-cache", "64") == 2
    assert "context of 1024" in capfd.readouterr().err


def test_identity(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("identity", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "SmolLM2-135M-Instruct"
    assert {"weights", "architecture", "config", "dtype"} <= set(found["ingredients"])
    assert len(bytes.fromhex(found["root"])) == 32
