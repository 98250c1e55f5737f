# SPDX-License-Identifier: Apache-2.0
"""``ebpflb demo``: print the steps of ``ebpflb.lab.demo``, or open a shell on a host."""

import fcntl
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click

from ebpflb.cli import common
from ebpflb.errors import NodeError
from ebpflb.kernel.attach.cgroup_links import cgroup_root
from ebpflb.kernel.attach.device_programs import unpin_all
from ebpflb.kernel.maps.state_dir import BPFFS, StateDir
from ebpflb.lab.demo import CONNECTIONS_A_LINE, PORT, V4, WEB, Demo, environment
from ebpflb.lab.hosts import Lab
from ebpflb.lab.netns import NETNS
from ebpflb.tools.pins import paths

# The names of everything in a demo begin so; the id of its user, and its pid, follow.
DEMO_PREFIX = "ebpflb-demo"
RUN = Path("/run")
HOSTS = {"node": "node", "client": "node", "outside": "."}  # -> the cgroup of its processes
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
COMMANDS = ("status", f"services get default/{WEB}", f"explain {V4}:{PORT} --from 10.244.1.2")


@click.group(invoke_without_command=True)
@click.option("--keep", is_flag=True, help="Keep everything, and print how to inspect it.")
@click.option("--remove", is_flag=True, help="Only remove what an earlier --keep left behind.")
@click.pass_context
def demo(context: click.Context, keep: bool, remove: bool) -> None:
    """Demonstrate ebpflb with real traffic.

    Sets up a small cluster of network namespaces on this machine. Needs no Kubernetes and changes
    nothing else. Removes everything at the end, also after an interruption. At the start it removes
    what earlier demos of the same user left behind, with --keep or because they were killed.

    \b
    $ ebpflb demo
    $ ebpflb demo --keep
    $ ebpflb demo --remove
    """
    if context.invoked_subcommand:
        return
    common.require_capabilities()
    if not shutil.which("ip"):
        raise NodeError("the demo makes network namespaces by ip(8): apt install iproute2")
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupted)
    left = _remove_ended(click.echo if remove else lambda line: None)
    if remove:
        if not left:
            click.echo("no demo was found")
        return
    name = f"{DEMO_PREFIX}-{_user()}-{os.getpid()}"
    with ExitStack() as stack:
        stack.callback(_remove, name)
        _heading("set-up: a small cluster on this machine")
        demo = Demo(stack.enter_context(Lab(name)), RUN / name, _say)
        demo.build()
        _run(demo)
        if keep:
            demo.agent.start()
            _print_hints()
            stack.pop_all()
            return
    _heading("everything is removed; `ebpflb demo --keep` keeps it, for commands such as")
    _print_commands()


@demo.command()
@click.argument("host", type=click.Choice(list(HOSTS)), default="node")
def shell(host: str) -> None:
    """Open a shell on a host of the demo that `ebpflb demo --keep` left.

    Every command works there. The shell begins in the folder of the node's manifests. HOST is
    node (the default), client (a pod on the node), or outside (a client outside of the cluster).

    \b
    $ ebpflb demo shell
    $ ebpflb demo shell client
    $ ebpflb demo shell outside
    """
    common.require_capabilities()
    kept = sorted(RUN.glob(f"{DEMO_PREFIX}-{_user()}-*"), key=lambda it: it.stat().st_mtime)
    if not kept:
        raise NodeError("no demo is kept here: run `ebpflb demo --keep`")
    name = kept[-1].name
    (cgroup_root() / name / HOSTS[host] / "cgroup.procs").write_text(str(os.getpid()))
    own = str(Path(sys.executable).parent)
    where = environment(paths(BPFFS / f"{name}-node", kept[-1] / "node/run"))
    os.environ |= where | {"PATH": f"{own}:{os.environ.get('PATH', '')}"}
    os.chdir(kept[-1] / "node/manifests")
    click.echo(f"a shell on {host} of {name}; `exit` ends it", err=True)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and a program inherits that
    program = os.environ.get("SHELL", "/bin/sh")
    os.execvp("nsenter", ["nsenter", f"--net={NETNS / name}-{host}", program])


def _interrupted(*_: object) -> None:
    """Remove everything, whatever signals follow."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(1)


def _user() -> int:
    """Return the user who called sudo, or else the user of this process."""
    return int(os.environ.get("SUDO_UID") or os.geteuid())


def _remove_ended(say: Callable[[str], None]) -> bool:
    """Remove this user's demos whose process has ended, kept or killed, and print which.

    ``say`` gets the reason why another demo stays. Return whether there was any demo. A lock keeps
    another process from removing the same demos at the same time.
    """
    lock = os.open(RUN, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        paths = [path for place in (RUN, NETNS, cgroup_root(), BPFFS) for path in place.glob("*")]
        found = {re.match(rf"{DEMO_PREFIX}-(\d+)-(\d+)\b", path.name) for path in paths}
        demos = sorted({(it[0], it[1], it[2]) for it in found if it})
        for name, user, pid in demos:
            if int(user) != _user():
                say(f"{name} stays: it is of user {user}")
            elif _is_demo(pid):
                say(f"{name} is still running: end its process {pid} first")
            else:
                _remove(name)
                click.echo(f"removed: {name}, left by an earlier demo")
        return bool(demos)
    finally:
        os.close(lock)


def _is_demo(pid: str) -> bool:
    """Whether this process runs a demo. The PID of an ended demo may have been reused."""
    try:
        words = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"demo" in words and any(b"ebpflb" in word for word in words)


def _remove(name: str) -> None:
    """Stop and remove everything of one demo."""
    Lab(name).sweep()
    for state in BPFFS.glob(f"{name}-*") if BPFFS.is_dir() else ():
        unpin_all(StateDir(state))
    shutil.rmtree(RUN / name, ignore_errors=True)


def _run(demo: Demo) -> None:
    _heading(f"{CONNECTIONS_A_LINE} connections each to the Service web, with three endpoints")
    demo.connect()
    _heading("the Service is scaled from three endpoints to four")
    demo.grow()
    _heading("what the node serves, and why a connection goes where it goes")
    demo.ebpflb("services", "get", f"default/{WEB}")
    click.echo()
    demo.ebpflb("explain", f"{V4}:{PORT}", "--from", demo.client.v4)
    _heading("a client outside connects to a NodePort: one endpoint here, one elsewhere")
    demo.enter()
    demo.ebpflb("flows", "list", "--service", "default/shop")
    _heading("a load balancer address moves when the cable of its node is pulled")
    demo.announce()
    _heading("the agent is killed with SIGKILL; new connections still work")
    demo.kill()


def _heading(text: str) -> None:
    click.secho(f"\n# {text}", bold=True)


def _say(line: str) -> None:
    """Print a line; a command is coloured on a terminal."""
    is_command = line.lstrip().startswith("$ ")
    click.secho(line, fg="cyan" if is_command else None)
    sys.stdout.flush()


def _print_hints() -> None:
    _heading("the agent runs again, and all is kept. A shell on its node, and the end:")
    click.echo(f"{sys.argv[0]} demo shell\n{sys.argv[0]} demo --remove")
    _heading("try in the shell:")
    _print_commands()


def _print_commands() -> None:
    for words in COMMANDS:
        click.echo(f"ebpflb {words}")
