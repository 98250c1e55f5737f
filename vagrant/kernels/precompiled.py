# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest inside the lab's machines: tests use the bytecode that was compiled outside.

Emulated, one compilation takes ten seconds. The bytecode is in the agent's cache, where an entry is
named by the hash of sources, flags and BCC's version, so bytecode of other sources is not used.
"""

from pathlib import Path

from ebpflb.datapath.programs import compiler
from ebpflb.options import Paths

_own_cache = compiler._cached


def _cached_or_precompiled(entry: Path) -> dict[str, bytes] | None:
    return _own_cache(entry) or _own_cache(Paths.cache / entry.name)


def pytest_configure() -> None:
    """Tests compile into caches of their own."""
    compiler._cached = _cached_or_precompiled
