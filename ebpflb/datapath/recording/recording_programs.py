# SPDX-License-Identifier: Apache-2.0
"""Loads the recording variant of the programs with private maps, and asks it."""

import os
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from ebpflb.datapath import datapath
from ebpflb.datapath.programs import compiler, loader, precompile, testrun
from ebpflb.datapath.recording import steps
from ebpflb.datapath.recording.private_maps import PrivateMaps
from ebpflb.datapath.recording.steps import SocketQuestion, Step

_EMPTY = bytes(64)  # the programs for sockets look at no packet
ACTIONS = {testrun.PASS: "pass", testrun.DROP: "drop", testrun.REDIRECT: "redirect"}


class Answer(StrEnum):
    """What a hook does with a call, as enum answer in bpf/sockets/reject.h."""

    DENY = "deny"
    LEAVE = "leave"
    REWRITE = "rewrite"


class Handled(NamedTuple):
    """What a program did with a packet: ``action`` is pass, drop or redirect."""

    action: str
    frame: bytes
    mark: int
    steps: list[Step]


class RecordingPrograms:
    """The programs for sockets and for packets.

    To be used in the node's network namespace, whose routes and devices the kernel takes.
    """

    def __init__(self, maps: PrivateMaps, cache: Path) -> None:
        """Raises CompileError, VerifierError, KernelError or NodeError."""
        self._steps = maps.maps["steps"].fd
        self.maps = maps
        with ExitStack() as opened:
            self._fds = self._load(precompile.EXPLAIN, datapath.socket_flags(), cache)
            opened.callback(self._close)
            flags = (*datapath.packet_flags(), precompile.RECORDING)
            self._fds |= self._load(datapath.PACKET_SOURCE, flags, cache)
            self._opened = opened.pop_all()

    def __enter__(self) -> "RecordingPrograms":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.close()

    def call(
        self, question: SocketQuestion, *, datagram: bool = False
    ) -> tuple[Answer, list[Step]]:
        """What becomes of connect(), or of an unconnected socket's sendmsg()."""
        steps.begin(self._steps, question)
        program = self._fds["explain_sendmsg" if datagram else "explain_connect"]
        ran = testrun.run(program, _EMPTY)
        return list(Answer)[ran.retval], steps.read(self._steps)

    def handle(
        self, hook: str, frame: bytes, *, ifindex: int, came_by: int = 0, mark: int = 0
    ) -> Handled:
        """What becomes of a packet at "ingress" or "egress" of a device.

        ``came_by``: where a packet came in that is leaving; 0: the node itself sends it. Raises
        KernelError: ENODEV where there is no such device, EINVAL where the kernel (before 5.15)
        cannot be told ``came_by``.
        """
        steps.begin(self._steps)
        ran = testrun.run(
            self._fds[hook], frame, ifindex=ifindex, ingress_ifindex=came_by, mark=mark
        )
        return Handled(ACTIONS[ran.retval], ran.packet, ran.mark, steps.read(self._steps))

    def _load(self, source: str, flags: tuple[str, ...], cache: Path) -> dict[str, int]:
        compiled = compiler.compile_source(source, flags, cache=cache)
        return {program.name: program.fd for program in loader.load(compiled, self.maps.maps)}

    def _close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
