# SPDX-License-Identifier: Apache-2.0
"""What `ebpflb audit` compares of the flowtable, by what is in the maps."""

from collections.abc import Mapping
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any

import pytest

from ebpflb.kernel.netfilter import flowtable, nft
from ebpflb.kernel.netfilter.flowtable import Contents, elements
from ebpflb.model.drift import Part
from ebpflb.plan.entries import Frontend
from ebpflb.tools import node_audit

NODE = ip_address("192.0.2.1")
FRONTENDS = (Frontend(ip_address("10.96.0.10"), 80, 6), Frontend(ip_address("0.0.0.0"), 30080, 17))
WHOLE = Contents(frozenset({"lo"}), elements(FRONTENDS, [NODE]))


def maps() -> Mapping[str, Any]:
    """Device 1 is served, and one that has gone."""
    held = {"devices": (1, 999999), "node_addresses": (NODE,), "services": FRONTENDS}
    return {
        name: SimpleNamespace(items=lambda keys=keys: [(key, 1) for key in keys])
        for name, keys in held.items()
    }


@pytest.mark.parametrize(
    ("there", "found", "drifts"),
    [
        (True, WHOLE, 0),
        (True, None, 1),
        (True, Contents(frozenset(), frozenset()), 2),
        (False, None, 0),
    ],
    ids=["whole", "changed", "empty", "none"],
)
def test_in_flowtable(
    monkeypatch: pytest.MonkeyPatch, there: bool, found: Contents | None, drifts: int
) -> None:
    """A flowtable that is there is compared with what the maps ask for."""
    monkeypatch.setattr(flowtable, "read", lambda _: found)
    monkeypatch.setattr(nft, "exists", lambda _: there)
    named = list(node_audit.in_flowtable(maps()))
    assert [drift.part for drift in named] == [Part.FLOWTABLE] * drifts
