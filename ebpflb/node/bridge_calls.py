# SPDX-License-Identifier: Apache-2.0
"""Whether bridges of this network namespace hand packets to netfilter (br_netfilter)."""

from ebpflb.model.addresses import Family
from ebpflb.model.bridged_pods import SYSCTLS
from ebpflb.node import sysctl


def bridge_calls() -> dict[Family, bool]:
    """By family; without the module br_netfilter there are no such sysctls."""
    return {family: _is_on(name) for family, name in SYSCTLS.items()}


def _is_on(name: str) -> bool:
    try:
        return sysctl.path(name).read_text().strip() == "1"
    except OSError:
        return False
