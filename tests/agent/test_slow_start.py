# SPDX-License-Identifier: Apache-2.0
"""Slow starts in the agent's loop: weights in the maps grow by themselves, and outlive an agent."""

from typing import Any

from ebpflb.lab.agents import wait_until
from ebpflb.model import annotations
from ebpflb.model.events import Kind
from tests.agent.fakes import Harness, changed, listed, service, slices

NODES = listed(Kind.NODE)
ONE, BOTH = slices("a", "10.1.0.1"), slices("a", "10.1.0.1", "10.1.0.2")


def annotated(seconds: str) -> Any:
    return service("a", "10.96.0.1", {annotations.SLOW_START_ANNOTATION: seconds})


def weights(harness: Harness) -> list[int]:
    """Return the weights of the service's slots."""
    (entry,) = harness.datapath.maps.services.values()
    block = range(entry.block.base, sum(entry.block))
    return [harness.datapath.maps.slots[slot].weight for slot in block]


def test_a_new_weight_grows_and_survives_a_restart(harness: Harness) -> None:
    """The first start is not a slow one, and a restart neither begins again nor ends it."""
    everything = [listed(Kind.SERVICE, annotated("1h")), listed(Kind.ENDPOINT_SLICE, ONE), NODES]
    harness.start()
    harness.send(*everything)
    assert weights(harness) == [100]
    harness.send(changed(Kind.ENDPOINT_SLICE, BOTH))
    assert weights(harness) == [100, 10]
    harness.stop()
    harness.start()
    harness.datapath.plans.clear()
    everything[1] = listed(Kind.ENDPOINT_SLICE, BOTH)
    harness.send(*everything)
    assert weights(harness) == [100, 10]
    assert not harness.datapath.plans
    harness.send(changed(Kind.SERVICE, annotated("3s")))
    wait_until("the weight is whole", lambda: weights(harness) == [100, 100])
    plans = len(harness.datapath.plans)
    assert 1 <= plans <= 10
