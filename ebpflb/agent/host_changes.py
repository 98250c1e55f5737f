# SPDX-License-Identifier: Apache-2.0
"""What an agent changes of the node besides its own maps and programs.

It is changed only when all else is ready: the configuration can be used, the programs are loaded,
and every map is written. A first start that fails nevertheless undoes it.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType

from ebpflb import stopping
from ebpflb.datapath.maps.state_dir import StateDir
from ebpflb.errors import EbpflbError
from ebpflb.node import conntrack, netfilter_table, nft, reserved_ports
from ebpflb.node.netfilter_rules import TABLE
from ebpflb.options import Options


class HostChanges:
    """As a context manager it undoes them if an error ends it while nothing is attached."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._had_ports = options.paths.ports_file.exists()
        self._had_table = True  # until it is known
        self._settings: dict[Path, str] = {}  # conntrack's, as they were before

    def __enter__(self) -> "HostChanges":
        with suppress(EbpflbError):
            self._had_table = nft.exists(TABLE)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and not any(StateDir(self._options.paths.state).links()):
            self.undo()

    def make(self) -> str | None:
        """Sets conntrack's settings and reserves the ports; why these are not reserved, if so.

        Raises NodeError if a setting cannot be set.
        """
        conntrack.set_up(self._options.conntrack_wanted, former=self._settings)
        record, ports = self._options.paths.ports_file, self._options.masquerade_ports
        return reserved_ports.try_to_reserve(record, *ports)

    def undo(self) -> None:
        """What cannot be undone is logged, and all else is undone."""
        steps: list[Callable[[], object]] = [
            partial(conntrack.restore, *each) for each in reversed(self._settings.items())
        ]
        if not self._had_ports:
            steps.append(partial(reserved_ports.release, self._options.paths.ports_file))
        if not self._had_table:
            steps.append(netfilter_table.remove)
        stopping.run_all(*steps, failed="the node's settings are not as they were")
