# SPDX-License-Identifier: Apache-2.0
"""Groups of tests that one worker of pytest-xdist runs one after the other.

A file's tests stay together, because they share expensive set-ups, unless one of the tables says
that they share nothing.
"""

from xdist.scheduler import LoadScopeScheduling

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


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a free worker the next group of tests."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def group(nodeid: str) -> str:
    """Return the name of the group that a test belongs to."""
    file, _, test = nodeid.partition("::")
    if file in SEPARATE_TESTS:
        return nodeid
    if file in SEPARATE_PARAMETERS:
        _, _, parameters = test.partition("[")
        return f"{file}[{parameters.partition('-')[0]}"
    return file
