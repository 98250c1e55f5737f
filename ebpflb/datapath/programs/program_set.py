# SPDX-License-Identifier: Apache-2.0
"""The programs of one variant that may take the place of those that serve."""

from collections.abc import Mapping
from itertools import chain

from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.programs import compiler, loader
from ebpflb.datapath.programs.loader import Program


class ProgramSet:
    """Loaded with ``maps``; those for packets without a link header when they are asked for.

    Raises VerifierError, KernelError or NodeError.
    """

    def __init__(
        self,
        sockets: compiler.Compiled,
        packets: Mapping[bool, compiler.Compiled],
        maps: Mapping[str, Map],
    ) -> None:
        """``packets``: by whether they have a link header."""
        self._compiled, self._maps = packets, maps
        with_header, self.sockets = loader.load_all([packets[True], sockets], maps)
        self._packets = {True: with_header}

    def packets(self, link_header: bool) -> list[Program]:
        if link_header not in self._packets:
            self._packets[link_header] = loader.load(self._compiled[link_header], self._maps)
        return self._packets[link_header]

    @property
    def programs(self) -> list[Program]:
        return [*self.sockets, *chain.from_iterable(self._packets.values())]

    def close(self) -> None:
        """Those that are attached stay."""
        loader.close(self.programs)
