# SPDX-License-Identifier: Apache-2.0
"""The entries that belong to one flow, and the flow's state."""

import pytest

from ebpflb.entries.flows import (
    Entries,
    FlowState,
    gather,
)
from ebpflb.model.services import Protocol
from tests.plan.flow_builders import SECOND, Made

KINDS = [
    Made(1),
    Made(1, changed=True),
    Made(1, masqueraded=True),
    Made(1, masqueraded=True, changed=True),
    Made(1, masqueraded=True, chosen=False),
    Made(1, Protocol.UDP, masqueraded=True),
]


@pytest.mark.parametrize("made", KINDS, ids=str)
def test_one_leads_to_all(made: Made) -> None:
    """From each entry all of the flow are found, the client's request first, and no other's."""
    entries = made.plain()
    store = entries | Made(2).plain() | Made(3, changed=True, masqueraded=True).plain()
    for key, flow in entries.items():
        assert list(gather(key, flow, store.get).items()) == list(entries.items())


CONNECTIONS = [
    ("request seen", "", FlowState.OPENING),
    ("request", "seen", FlowState.ANSWERED),
    ("request seen", "seen", FlowState.OPEN),
    ("request seen fin", "seen", FlowState.CLOSING),
    ("request seen", "seen fin", FlowState.CLOSING),
    ("request seen fin", "seen fin", FlowState.CLOSED),
    ("request seen rst", "", FlowState.RESET),
    ("request seen", "seen rst", FlowState.RESET),
]


def lasting(made: Made, words: str, seconds: float) -> Entries:
    """UDP entries of a flow that was last used so long after its first packet."""
    entries = made.entries(["request seen", "request masquerade seen", words, words], [0] * 4)
    return {
        key: flow._replace(created=flow.last_seen - int(seconds * SECOND))
        for key, flow in entries.items()
    }
