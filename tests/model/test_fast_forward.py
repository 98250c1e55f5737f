# SPDX-License-Identifier: Apache-2.0
"""When established flows bypass the stack."""

import pytest

from ebpflb.model.nodes import EachPacketRules, why_off

LOGS, COUNTS = "table inet filter, chain forward: handle 3: logs each packet", "another"


@pytest.mark.parametrize("rules", [None, EachPacketRules(), EachPacketRules((LOGS,))])
def test_off_and_on(rules: EachPacketRules | None) -> None:
    """Without auto the rules do not matter."""
    assert why_off("off", rules)
    assert why_off("on", rules) is None


def test_auto() -> None:
    """With auto they are on while no rule is known, and off while that is not known."""
    assert why_off("auto", EachPacketRules()) is None
    assert why_off("auto", None) == "the firewall rules have not been read yet"
    assert why_off("auto", EachPacketRules((LOGS,))) == LOGS
    assert why_off("auto", EachPacketRules((LOGS, COUNTS))) == f"{LOGS}; 1 more"
