"""What is written about metrics, in docs/ and deploy/, names those that there are."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from foreword.telemetry import Metrics
from tests.telemetry.test_metrics import IDLE

ROOT = Path(__file__).parents[2]
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds."""


def known() -> dict[str, set[str]]:
    """Each series that a scrape may have, and its labels."""
    metrics, labels = Metrics(), dict[str, set[str]]()
    for collector in metrics._registry._collector_to_names:
        families: Any = [collector] if hasattr(collector, "_labelnames") else list(collector.collect())
        for family in families:
            labels[getattr(family, "_name", None) or family.name] = set(family._labelnames)
    series: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render(IDLE).decode()):
        its = labels[family.name]
        if family.type == "counter":
            series[f"{family.name}_total"] = its
        elif family.type == "histogram":
            series |= {f"{family.name}_bucket": {*its, "le"}, f"{family.name}_sum": its, f"{family.name}_count": its}
        else:
            series[family.name] = its
    return series


def grafana() -> dict[str, Any]:
    return json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text(encoding="utf-8"))


def alerts() -> list[dict[str, Any]]:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus-alerts.yaml").read_text(encoding="utf-8"))
    return [rule for group in rules["groups"] for rule in group["rules"]]


def wrong(query: str) -> list[str]:
    """Series of a query that there are not, and labels that they do not have."""
    series, found = known(), list[str]()
    names = re.findall(r"\b(foreword_\w+)(?:\{([^}]*)\})?", query)
    for name, matchers in names:
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        if name not in series:
            found.append(name)
        elif not labels <= series[name] | SCRAPED:
            found.append(f"{name}: {labels - series[name] - SCRAPED}")
    grouped = {label.strip() for part in re.findall(r"\bby \(([^)]*)\)", query) for label in part.split(",")}
    its = set[str]().union(SCRAPED, *(series.get(name, set()) for name, _ in names))
    return found + sorted(grouped - its)


def test_the_scan_finds_what_is_wrong() -> None:
    assert wrong('rate(foreword_blocks_left_total{cause="quota"}[5m])') == []
    assert wrong("foreword_blocks_lost_total") == ["foreword_blocks_lost_total"]
    assert wrong('foreword_blocks{cause="quota"}') == ["foreword_blocks: {'cause'}"]
    assert wrong("sum by (reason) (foreword_blocks)") == ["reason"]


@pytest.mark.parametrize("panel", grafana()["panels"], ids=lambda panel: panel["title"])
def test_every_panel_asks_for_what_there_is(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        assert "foreword_" in target["expr"]
        assert target["expr"].count("(") == target["expr"].count(")")
        assert wrong(target["expr"]) == []
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", target["expr"]))))


def test_the_panels_are_laid_out_apart() -> None:
    panels = grafana()["panels"]
    assert (
        len({panel["id"] for panel in panels}) == len({str(panel["gridPos"]) for panel in panels}) == len(panels) >= 10
    )


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_every_alert_asks_for_what_there_is_and_says_what_to_do(rule: dict[str, Any]) -> None:
    assert "foreword" in rule["expr"]
    assert rule["expr"].count("(") == rule["expr"].count(")")
    assert wrong(rule["expr"]) == []
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["action"]


def test_the_page_of_metrics_names_them_all_and_no_other() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", text, re.MULTILINE)
    told = {
        f"{name}_sum" if kind == "histogram" else name: set(re.findall(r"`(\w+)`", labels))
        for name, kind, labels in rows
    }
    assert told == {name: its for name, its in known().items() if not name.endswith(("_bucket", "_count"))}
