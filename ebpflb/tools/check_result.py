# SPDX-License-Identifier: Apache-2.0
"""What `ebpflb check` says of one feature of the node."""

from typing import NamedTuple


class CheckResult(NamedTuple):
    """Of one feature. ``remedy`` is "" if it is ok; else what to do, or what does not work."""

    feature: str
    ok: bool
    required: bool
    detail: str
    remedy: str


def feature(
    feature: str, ok: bool, since: str, lost: str, *, required: bool = False
) -> CheckResult:
    """Of a feature that the kernel has since some version; ``lost``: what is lost without it."""
    detail = "yes" if ok else f"no (since kernel {since})"
    return CheckResult(feature, ok, required, detail, "" if ok else lost)
