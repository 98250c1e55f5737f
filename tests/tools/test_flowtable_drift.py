# SPDX-License-Identifier: Apache-2.0
"""What `ebpflb audit` compares of the flowtable, by what is in the maps."""

from collections.abc import Mapping
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any

import pytest

from ebpflb.kernel.netfilter import flowtable
from ebpflb.kernel.netfilter.flowtable import Contents, elements
from ebpflb.model.drift import Part
from ebpflb.plan.entries import Frontend
from ebpflb.tools import node_audit

NODE = ip_address("192.0.2.1")
FRONTENDS = (Frontend(ip_address("10.96.0.10"), 80, 6), Frontend(ip_address("0.0.0.0"), 30080, 17))
WHOLE = Contents(frozenset({"lo"}), elements(FRONTENDS, [NODE]))
BOTH = frozenset({"netfilter", "fast_forward"})


def maps(flags: frozenset[str]) -> Mapping[str, Any]:
    """Device 1 is served, and one that has gone."""
    settings = SimpleNamespace(get=lambda _: SimpleNamespace(flags=flags))
    held = {"devices": (1, 999999), "node_addresses": (NODE,), "services": FRONTENDS}
    others = {
        name: SimpleNamespace(items=lambda keys=keys: [(key, 1) for key in keys])
        for name, keys in held.items()
    }
    return {"settings": settings, **others}


@pytest.mark.parametrize(
    ("flags", "found", "obstacle", "drifts"),
    [
        (BOTH, WHOLE, None, 0),
        (BOTH, None, None, 1),
        (BOTH, Contents(frozenset(), frozenset()), None, 2),
        (BOTH, None, "no flowtable", 0),
        (BOTH | {"shadow"}, None, None, 0),
        (frozenset({"netfilter"}), None, None, 0),
        (frozenset({"fast_forward"}), None, None, 0),
    ],
    ids=["whole", "gone", "empty", "no kernel", "shadow", "not chosen", "flow tables"],
)
def test_in_flowtable(
    monkeypatch: pytest.MonkeyPatch,
    flags: frozenset[str],
    found: Contents | None,
    obstacle: str | None,
    drifts: int,
) -> None:
    """Named where the option has an effect, and the flowtable is not as the maps ask for."""
    monkeypatch.setattr(flowtable, "read", lambda _: found)
    monkeypatch.setattr(node_audit, "flowtable_obstacle", lambda: obstacle)
    named = list(node_audit.in_flowtable(maps(flags)))
    assert [drift.part for drift in named] == [Part.FLOWTABLE] * drifts
