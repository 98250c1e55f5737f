# SPDX-License-Identifier: Apache-2.0
"""Divides the tests among the workers of pytest-xdist by their groups."""

from xdist.scheduler import LoadScopeScheduling

from tests.kit.groups import group


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a free worker the next group of tests."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)
