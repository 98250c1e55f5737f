# SPDX-License-Identifier: Apache-2.0
"""What an agent records in its state directory: its directories and sizes of maps.

A bpffs has no ordinary files, but symbolic links; so a record is the text of a link without a
target:

    <state-dir>/run-dir   -> "<run-dir>:<state-dir>"
    <state-dir>/map-sizes -> "backends=262144,flows=1048576"

The state directory's name is recorded too, as the agent sees it: inside a container the same
directories may lie below a mount point such as /host. Sizes are recorded when maps have them; a
node with the sizes of maps.h has no such record.
"""

import os
from contextlib import suppress
from pathlib import Path

from ebpflb.model import map_sizes
from ebpflb.model.map_sizes import MapSizes
from ebpflb.options import Paths

RECORD = "run-dir"
SIZES_LINK = "map-sizes"


def write_record(paths: Paths) -> None:
    """Write the record. Raises OSError."""
    if not is_record_of(paths):
        link = paths.state / RECORD
        link.unlink(missing_ok=True)
        link.symlink_to(_record_text(paths))


def is_record_of(paths: Paths) -> bool:
    """Whether these paths are recorded."""
    with suppress(OSError):
        return os.readlink(paths.state / RECORD) == _record_text(paths)
    return False


def _record_text(paths: Paths) -> str:
    return f"{paths.run}:{paths.state}"


def read_record(state: Path, cache: Path = Paths.cache) -> Paths | None:
    """Return the paths of the state directory's agent, as seen here; None if none are recorded."""
    try:
        run, _, recorded = os.readlink(state / RECORD).rpartition(":")
    except OSError:
        return None
    if not (os.path.isabs(run) and os.path.isabs(recorded) and str(state).endswith(recorded)):
        return None
    prefix = str(state).removesuffix(recorded)
    name = "" if not prefix else Paths(Path(recorded)).name
    return Paths(state, Path(f"{prefix}{run}"), cache, known_as=name)


def write_sizes(state: Path, sizes: MapSizes) -> None:
    """Record the sizes that the maps have. Raises OSError."""
    if read_sizes(state) != sizes:
        (state / SIZES_LINK).unlink(missing_ok=True)
        if sizes:
            (state / SIZES_LINK).symlink_to(map_sizes.show(sizes))


def read_sizes(state: Path) -> MapSizes:
    """Return the recorded sizes; empty if none can be read."""
    with suppress(OSError, ValueError):
        return map_sizes.parse(os.readlink(state / SIZES_LINK))
    return ()
