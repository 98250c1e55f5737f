# SPDX-License-Identifier: Apache-2.0
"""Whether this kernel has flowtables (nf_flow_table, nft_flow_offload): one is made.

In a network namespace of its own, which ends with the probe: no packet goes through it. Parts that
are modules are loaded by that, if they are there.
"""

from concurrent.futures import ThreadPoolExecutor

from ebpflb.errors import NodeError, in_words
from ebpflb.node import flowtable
from ebpflb.node.scratch_namespace import leave


def flowtable_obstacle() -> str | None:
    """Why there cannot be any; None: there can."""
    with ThreadPoolExecutor(1, "probe") as thread:
        try:
            refused = thread.submit(_try).result()
        except (NodeError, OSError) as error:
            return f"the kernel can make no flowtable ({in_words(error)})"
    return next(iter(refused.values()), None)


def _try() -> dict[str, str]:
    """The same one as the engine's, at the new namespace's loopback."""
    leave()
    flowtable.make(flowtable.TABLE)
    return flowtable.add_devices(flowtable.TABLE, ["lo"])
