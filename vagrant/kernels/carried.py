# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest for the inside of the lab: what was compiled outside is found.

Emulated, one compilation takes ten seconds. The bytecode lies in the agent's own cache, where an
entry is named by the hash of sources, flags and BCC's version: no other sources' is used.
"""

from pathlib import Path

from ebpflb.datapath.programs import compiler
from ebpflb.options import Paths

_own_cache = compiler._cached


def _cached_or_carried(entry: Path) -> dict[str, bytes] | None:
    return _own_cache(entry) or _own_cache(Paths.cache / entry.name)


def pytest_configure() -> None:
    """Tests compile into caches of their own."""
    compiler._cached = _cached_or_carried
