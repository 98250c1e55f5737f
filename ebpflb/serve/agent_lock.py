# SPDX-License-Identifier: Apache-2.0
"""Whether an agent serves a state directory, and the lock that keeps a second agent away.

There are two locks, of the state directory and of a file in the run directory. The first one
decides; the second one survives a remount of the bpffs, and is known to earlier versions.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ebpflb import files
from ebpflb.errors import instead_of_os_error
from ebpflb.kernel.maps import state_dir
from ebpflb.kernel.maps.state_dir import StateLock
from ebpflb.model.events import Drift, Part
from ebpflb.options import Paths
from ebpflb.serve import status


class AgentLock:
    """The lock of the state directory, and the record in it.

    Both are gone if another bpffs is mounted there, while the agent continues to run.
    """

    def __init__(self, paths: Paths, state: StateLock) -> None:
        self._paths, self._state = paths, state

    def faults(self) -> Iterator[Drift]:
        """Yield which of the two is missing."""
        if not self._state.holds():
            yield Drift(Part.PIN, f"lock of {self._paths.state}", "is not held any more")
        elif not state_dir.is_record_of(self._paths):
            yield Drift(Part.PIN, f"{self._paths.state}/{state_dir.RECORD}", "is missing")

    def restore(self) -> bool:
        """Restore both; return False if another agent has taken the lock meanwhile.

        Raises NodeError if there is no bpffs.
        """
        if not self._state.holds():
            self._state.release()
            if not self._state.take():
                return False
        _record(self._paths)
        return True


@contextmanager
def held(paths: Paths) -> Iterator[AgentLock]:
    """Hold the lock while the agent runs, and record the run directory.

    Raises NodeError if another agent runs, with its pid if that is known.
    """
    state = StateLock(paths.state)
    with status.lock(paths):
        if not state.take():
            raise status.second_agent(state_dir.read_record(paths.state) or paths)
        try:
            _record(paths)
            yield AgentLock(paths, state)
        finally:
            _remove_if_empty(paths)
            state.release()


def is_running(paths: Paths) -> bool:
    """Whether an agent holds either lock now."""
    return files.is_locked(paths.state) or status.is_running(paths)


def _record(paths: Paths) -> None:
    """Record the run directory.

    An agent with another run directory has ended: its additions to the kernel's list of reserved
    ports now belong to this agent.
    """
    former = state_dir.read_record(paths.state)
    if former is not None and former.run != paths.run:
        with suppress(OSError, files.UnusableFile):
            if not paths.ports_file.exists():
                files.replace(paths.ports_file, files.read_regular(former.ports_file))
        status.remove(former)
    with instead_of_os_error(str(paths.state)):
        state_dir.write_record(paths)


def _remove_if_empty(paths: Paths) -> None:
    """Remove a state directory that was created only for the lock: the agent did not even begin."""
    with suppress(OSError):
        if os.listdir(paths.state) == [state_dir.RECORD]:
            (paths.state / state_dir.RECORD).unlink()
            paths.state.rmdir()
