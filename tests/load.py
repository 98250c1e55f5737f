# SPDX-License-Identifier: Apache-2.0
"""The number of repetitions, for tests that repeat something many times.

EBPFLB_TEST_LOAD is the share of them that this machine can bear: less than 1 on the kernel lab's
machines, which are emulated and twenty times slower.
"""

import os

LOAD = float(os.environ.get("EBPFLB_TEST_LOAD", "1"))
EMULATED, EMULATED_PAUSE = 0.1, 0.5  # an emulated machine bears less than this; seconds


def scaled(count: int) -> int:
    """Return the count, scaled to the load that this machine can bear, but at least 1."""
    return max(1, round(count * LOAD))


def paused(seconds: float) -> float:
    """Return a client's pause between its requests.

    Clients that hardly pause leave an emulated machine no time to start an agent beside them.
    """
    return EMULATED_PAUSE if LOAD < EMULATED else seconds
