# SPDX-License-Identifier: Apache-2.0
"""The entries that belong to one flow, and the flow's state."""

import pytest

from ebpflb.entries.flows import gather
from ebpflb.model.services import Protocol
from tests.plan.flow_builders import Made

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
    """From each entry the whole flow is found, the client's request first, and no other flow."""
    entries = made.plain()
    store = entries | Made(2).plain() | Made(3, changed=True, masqueraded=True).plain()
    for key, flow in entries.items():
        assert list(gather(key, flow, store.get).items()) == list(entries.items())
