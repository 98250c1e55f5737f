# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the alerts use only what an agent exposes, and can be loaded."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from ebpflb.kernel.maps.layout import VERDICTS
from ebpflb.serve.conditions import Cause
from tests.deploy import promql
from tests.serve import subjects

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/ebpflb.json").read_text())
RULES: dict[str, Any] = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())
RUNBOOK = (ROOT / "docs/runbook.md").read_text()
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
OF_PROMETHEUS = {"up": promql.TARGET}


class Question(NamedTuple):
    """An expression, and the labels that its text uses."""

    where: str
    expr: str
    shown: frozenset[str]


def panel_questions() -> list[Question]:
    return [
        Question(
            f"{panel['title']} {target['refId']}",
            target["expr"],
            frozenset(re.findall(r"{{(\w+)}}", target["legendFormat"])),
        )
        for panel in PANELS
        for target in panel["targets"]
    ]


def alert_questions() -> list[Question]:
    return [
        Question(
            rule["alert"],
            rule["expr"],
            frozenset(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))),
        )
        for rule in ALERTS
    ]


QUESTIONS = panel_questions() + alert_questions()


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Return every series that an agent exposes, with its labels."""
    made = subjects.everything(monkeypatch)
    found: dict[str, set[str]] = {}
    for name, labels in subjects.values(made):
        found.setdefault(name, set()).update(key for key, _ in labels)
    return found


def whole(known: dict[str, set[str]]) -> promql.Labels:
    return {**known, **OF_PROMETHEUS}


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.where)
def test_every_metric_and_label_exists(known: dict[str, set[str]], question: Question) -> None:
    """Each expression is well-formed and uses existing series and labels, and so does its text."""
    labels = promql.labels(promql.parse(question.expr), whole(known))
    assert question.shown <= labels


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.where)
def test_verdicts_exist(question: Question) -> None:
    """Each named verdict is defined in layout.h."""
    named = re.findall(r'verdict[!=~]+"([^"]*)"', question.expr)
    assert {verdict for text in named for verdict in text.split("|")} <= set(VERDICTS.values())


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.where)
def test_conditions_exist(question: Question) -> None:
    """Each named condition is a Cause in serve/conditions.py."""
    assert set(re.findall(r'condition="([^"]*)"', question.expr)) <= set(Cause)


def test_dashboard_shows_what_is_ours(known: dict[str, set[str]]) -> None:
    """Each metric of a possible problem has a panel or an alert."""
    asked = {name for q in QUESTIONS for name in promql.series(promql.parse(q.expr))}
    ours = {name for name in known if name.startswith("ebpflb_")}
    assert ours - asked == {"ebpflb_masquerade_ports_reserved", "ebpflb_packet_path_info"}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_the_runbook_has_a_heading_for_each_alert(rule: dict[str, Any]) -> None:
    """The link of each alert leads to its reason or to its own heading, which says what to do."""
    path, _, heading = rule["annotations"]["runbook_url"].partition("#")
    sections = re.split(r"^### ", (ROOT / path).read_text(), flags=re.M)[1:]
    (section,) = (it for it in sections if anchor(it.partition("\n")[0]) == heading)
    assert len(section.partition("\n")[2].partition("\n#")[0].split()) > 5
    assert heading == rule["alert"].lower() or f"\n### {rule['alert']}\n" not in RUNBOOK


def anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def test_the_runbook_has_no_other_alerts() -> None:
    """The runbook does not describe alerts that were renamed or removed."""
    names = re.findall(r"^### (.*)$", RUNBOOK.split("\n## Alerts\n")[1], re.M)
    links = [rule["annotations"]["runbook_url"].partition("#")[2] for rule in ALERTS]
    assert [name.lower() for name in names] == [each for each in links if each.startswith("ebpflb")]
    assert {each for each in links if not each.startswith("ebpflb")} <= set(map(anchor, Cause))
