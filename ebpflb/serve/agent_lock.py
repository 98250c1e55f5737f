# SPDX-License-Identifier: Apache-2.0
"""Whether an agent serves a state directory, and the lock that keeps a second one away.

There are two locks, of the state directory and of a file in the run directory. The first is the
one that counts; the second stays where the bpffs is mounted anew, and is known to earlier versions.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ebpflb import files
from ebpflb.errors import NodeError
from ebpflb.kernel.maps import state_dir
from ebpflb.kernel.maps.state_dir import StateLock
from ebpflb.model.drift import Drift, Part
from ebpflb.options import Paths
from ebpflb.serve import status


class AgentLock:
    """The lock of the state directory, and the record in it. Where another bpffs has been mounted
    in the place of theirs both are gone, while the agent runs on.
    """

    def __init__(self, paths: Paths, state: StateLock) -> None:
        self._paths, self._state = paths, state

    def faults(self) -> Iterator[Drift]:
        """What of the two is not there."""
        if not self._state.holds():
            yield Drift(Part.PIN, f"lock of {self._paths.state}", "is not held any more")
        elif not state_dir.is_record_of(self._paths):
            yield Drift(Part.PIN, f"{self._paths.state}/{state_dir.RECORD}", "is missing")

    def restore(self) -> bool:
        """Whether both are there again; not if another agent has taken the lock meanwhile.

        Raises NodeError where there is no bpffs.
        """
        if not self._state.holds():
            self._state.release()
            if not self._state.take():
                return False
        _record(self._paths)
        return True


@contextmanager
def held(paths: Paths) -> Iterator[AgentLock]:
    """Held by an agent as long as it runs; the run directory is recorded from then on.

    Raises NodeError if another one runs, with its pid if that is known.
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
    """An agent with another run directory has ended: what it had added to the kernel's list of
    reserved ports is ours now.
    """
    former = state_dir.read_record(paths.state)
    if former is not None and former.run != paths.run:
        with suppress(OSError, files.UnusableFile):
            if not paths.ports_file.exists():
                files.replace(paths.ports_file, files.read_regular(former.ports_file))
        status.remove(former)
    try:
        state_dir.write_record(paths)
    except OSError as error:
        raise NodeError(f"{paths.state}: {error.strerror}") from error


def _remove_if_empty(paths: Paths) -> None:
    """A state directory that was made for the lock alone: the agent did not even begin."""
    with suppress(OSError):
        if os.listdir(paths.state) == [state_dir.RECORD]:
            (paths.state / state_dir.RECORD).unlink()
            paths.state.rmdir()
