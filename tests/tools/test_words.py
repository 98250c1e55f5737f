# SPDX-License-Identifier: Apache-2.0
"""Texts for steps that rarely occur in a real run."""

from ipaddress import ip_address
from typing import Any

from ebpflb.entries.services import Frontend
from ebpflb.kernel.maps.layout import VERDICTS
from ebpflb.kernel.recording import Step
from ebpflb.model.services import Protocol
from ebpflb.tools.explain.asking import POD_CLIENT, Client
from ebpflb.tools.explain.ways import Row, Words

NOWHERE = ip_address("0.0.0.0")
FACTS: Any = None  # not needed for these steps
NUMBERS = {name: number for number, name in VERDICTS.items()}


def noted(*steps: tuple[str, int]) -> Words:
    asked = Frontend(ip_address("10.96.0.10"), 80, Protocol.TCP)
    client = Client(POD_CLIENT, "web", ip_address("10.244.0.9"), netns=77)
    found = [Step(kind, value, NOWHERE) for kind, value in steps]
    return Words(FACTS, asked, client, found, is_packet=False)


def test_affinity_that_remembers_no_endpoint() -> None:
    """The row says that affinity remembers no endpoint, although the programs take no step for
    it.
    """
    row = Row("affinity", "ClientIP, 0 s: no endpoint is remembered")
    assert noted(("affinity_asked", 0)).rows == [row]


def test_a_decision_that_was_repeated_is_no_verdict() -> None:
    """A repeated decision is no verdict: the verdict is the last different decision."""
    steps = [("verdict", NUMBERS[name]) for name in ("translated", "retried")]
    assert noted(*steps).verdict == "translated"
    assert noted(steps[1]).verdict is None
