# SPDX-License-Identifier: Apache-2.0
"""``ebpflb`` as processes that are forked from one which has imported it.

An import takes half a second of CPU time, which a test run would spend hundreds of times.
Everything else is as in a process that is started afresh: it has its own pid, signals, output,
environment, directory, cgroup and network namespace, and enters the same ``main``. A file that
tests the start of a process uses the fixture ``started_anew``.

The process that forks runs this file too, and handles one request at a time.
"""

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from ebpflb.lab.agents import LabAgent
from ebpflb.lab.hosts import Process
from ebpflb.lab.netns import NETNS

_LONGEST = 1 << 16  # bytes of a request
_OUTPUTS = 2  # descriptors that come with a request: stdout and stderr
_API = {"--kubeconfig", "--master"}  # options of agents that need its client
_REPOSITORY = Path(__file__).parents[2]


class Server:
    """The process that forks; it ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            number = its.fileno()
            subprocess.Popen(
                [sys.executable, "-P", __file__, str(number)],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(_REPOSITORY)},
            )

    def ask(self, fds: Sequence[int] = (), **request: object) -> Any:
        """Return the process's answer to a request, which is sent with these descriptors."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], list(fds))
            return json.loads(self._socket.recv(_LONGEST))


@cache
def _server_of(pid: int) -> Server:
    """Return the server of a process; a forked child has its own."""
    return Server()


class Forked:
    """A forked process, with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, server: Server, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit status, or minus the signal that ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask(poll=self.pid)
            if self.returncode is not None:
                os.close(self._pidfd)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the result of ``poll``. Raises subprocess.TimeoutExpired."""
        if self.poll() is None:
            waiting = select.poll()
            waiting.register(self._pidfd, select.POLLIN)
            if not waiting.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("ebpflb", timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    words: Sequence[str],
    *,
    netns: str | None,
    cgroup: Path | None = None,
    cwd: str = "/",
    env: Mapping[str, str],
    stdout: IO[str],
    stderr: IO[str],
    before: tuple[str, str] = ("", ""),
) -> Forked:
    """Start a process that runs ``ebpflb`` with these words, by default in this process's
    cgroup; ``before`` is a module whose ``prepare`` it calls first, and the argument.
    """
    server = _server_of(os.getpid())
    pid = server.ask(
        [stdout.fileno(), stderr.fileno()],
        words=list(words),
        before=before,
        netns=netns and str(NETNS / netns),
        cgroup=cgroup and str(cgroup / "cgroup.procs"),
        cwd=cwd,
        env=dict(env),
    )
    return Forked(server, pid)


def run(
    *words: str, netns: str | None = None, cgroup: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Return the output of a command in this environment, by default where this process is."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        where: dict[str, Any] = {"netns": netns, "cgroup": cgroup, "cwd": os.getcwd()}
        process = start(words, **where, env=os.environ, stdout=out, stderr=err)
        try:
            status = process.wait(120)
        finally:
            process.kill()
            process.wait()
        said = [_read(each) for each in (out, err)]
        return subprocess.CompletedProcess(["ebpflb", *words], status, *said)


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


class ForkedAgent(LabAgent):
    """An agent that is forked, unless it is started by another command or ``again``."""

    anew = False
    before = ("", "")

    def spawn(self, words: Sequence[str], log: IO[str]) -> Process:
        if self.under or self.anew:
            return super().spawn(words, log)
        return start(
            words,
            netns=self.node.netns,
            cgroup=self.lab.cgroup,
            env=os.environ,
            stdout=log,
            stderr=log,
            before=self.before,
        )


def _serve(requests: socket.socket) -> None:
    """Handle requests until no process is left that could send one, or until this is a child."""
    from ebpflb.cli import COMMANDS

    for name in COMMANDS:  # children find them imported
        import_module(f"ebpflb.cli.{name}")
    gc.collect()
    gc.freeze()  # children do not look for garbage there, which would also copy the memory
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        said, fds, *_ = socket.recv_fds(requests, _LONGEST, _OUTPUTS)
        if not said:
            return
        request = json.loads(said)
        if _API & {word.partition("=")[0] for word in request.get("words", ())}:
            import_module("ebpflb.cluster.kubeconfig")  # with the Kubernetes client: a second
        if "poll" in request:
            ended, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        elif (answer := os.fork()) == 0:
            requests.close()
            _become(request, fds)
            return
        for fd in fds:
            os.close(fd)
        requests.send(json.dumps(answer).encode())


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Run the command in the child. Raises SystemExit when it has ended."""
    from pyroute2 import netns

    from ebpflb.cli import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, fd in enumerate(fds, start=1):
        os.dup2(fd, number)
        os.close(fd)
    if request["cgroup"]:
        Path(request["cgroup"]).write_text("0")
    if request["netns"]:
        netns.setns(request["netns"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["ebpflb", *request["words"]]
    module, argument = request["before"]
    if module:
        import_module(module).prepare(argument)
    main()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
