# SPDX-License-Identifier: Apache-2.0
"""Where the agent of a state directory keeps its files: recorded in that directory.

A bpffs has no ordinary files, but links; so the record is the text of a link that leads nowhere:

    <state-dir>/run-dir -> "<run-dir>:<state-dir>"

The state directory's name is recorded too, as the agent sees it: from within a container the same
directories may lie below a mount point such as /host.
"""

import os
from contextlib import suppress
from pathlib import Path

from ebpflb.options import Paths

RECORD = "run-dir"


def write(paths: Paths) -> None:
    """Raises OSError."""
    if not is_of(paths):
        link = paths.state / RECORD
        link.unlink(missing_ok=True)
        link.symlink_to(_text(paths))


def is_of(paths: Paths) -> bool:
    """Whether these are recorded."""
    with suppress(OSError):
        return os.readlink(paths.state / RECORD) == _text(paths)
    return False


def _text(paths: Paths) -> str:
    return f"{paths.run}:{paths.state}"


def read(state: Path, cache: Path = Paths.cache) -> Paths | None:
    """The paths of the state directory's agent, as they are seen here; None if none is recorded."""
    try:
        run, _, recorded = os.readlink(state / RECORD).rpartition(":")
    except OSError:
        return None
    if not (os.path.isabs(run) and os.path.isabs(recorded) and str(state).endswith(recorded)):
        return None
    prefix = str(state).removesuffix(recorded)
    name = "" if not prefix else Paths(Path(recorded)).name
    return Paths(state, Path(f"{prefix}{run}"), cache, known_as=name)
