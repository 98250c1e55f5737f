# SPDX-License-Identifier: Apache-2.0
"""Groups of tests that one process runs one after the other, and the cluster that a group keeps.

A file's tests stay together, because they share expensive set-ups, unless one of the tables says
that they share nothing, or that other files use the same cluster.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from ebpflb.model.packet_path import Engine

# Files whose tests share nothing. (Those of tests/deploy/test_rights.py do too, but every
# agent compiles there: several at once would time out on a machine that is busy.)
SEPARATE_TESTS = {
    "tests/cli/test_demo.py",
    "tests/cli/test_run_process.py",
    "tests/network/test_takeover.py",
    "tests/plan/test_properties.py",
    "tests/simulation/test_schedules.py",
}
# Files that build a cluster for each value of their first parameter.
SEPARATE_PARAMETERS = {
    "tests/network/test_killed_amid_changes.py",
    "tests/network/test_packets_setups.py",
}
# Files that leave the cluster as they got it; by engine, which is in the tests' names.
SHARED_CLUSTERS = {
    f"tests/network/test_{file}.py": name
    for name, files in {
        "one node": "e2e_services rates release sockets stale_udp",
        "two nodes": "egress firewall_check firewalls health_ports kernel_sockets moved_flows "
        "moving_udp netfilter_engine netfilter_segments on_removal other_filters packets_refusal "
        "rebalance rolling_update schedulers strangers",
    }.items()
    for file in files.split()
}


def group(nodeid: str) -> str:
    """Return the name of the group that a test belongs to."""
    file, _, test = nodeid.partition("::")
    _, _, parameters = test.partition("[")
    if file in SEPARATE_TESTS:
        return nodeid
    if file in SEPARATE_PARAMETERS:
        return f"{file}[{parameters.partition('-')[0]}"
    if file in SHARED_CLUSTERS:
        return f"{SHARED_CLUSTERS[file]}, {Engine.NETFILTER in parameters}"
    return file


class KeptCluster:
    """At most one cluster, with a key that says which one it is."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}
        self._stack = ExitStack()

    def get(self, key: Hashable, make: Callable[[], AbstractContextManager[Any]]) -> Any:
        """Return the kept cluster if it has this key; else remove it, and keep the one made now."""
        if key not in self._kept:
            self.remove()
            self._kept[key] = self._stack.enter_context(make())
        return self._kept[key]

    def remove(self) -> None:
        self._kept.clear()
        self._stack.close()
