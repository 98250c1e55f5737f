# SPDX-License-Identifier: Apache-2.0
"""Whether programs can open flows in the kernel's conntrack, found by opening one."""


def obstacle() -> str | None:
    """Why the conntrack engine cannot work on this node; None where it works."""
    return "this version of ebpflb has no conntrack engine"
