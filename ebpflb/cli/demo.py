# SPDX-License-Identifier: Apache-2.0
"""``ebpflb demo``: runs the steps of ``ebpflb.lab.demo`` with headings, and prints the maps."""

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
from ebpflb.cli.output import print_table
from ebpflb.kernel.attach.cgroup_links import cgroup_root
from ebpflb.kernel.attach.device_programs import unpin_all
from ebpflb.kernel.maps.state_dir import BPFFS, StateDir
from ebpflb.lab.demo import CONNECTIONS_A_LINE, PORT, TRAFFIC, V4, Demo
from ebpflb.lab.hosts import Lab
from ebpflb.lab.netns import NETNS
from ebpflb.tools.dump import dump_maps

DEMO_PREFIX = "ebpflb-demo"  # everything of a demo is called so, and its pid follows
RUN = Path("/run")


@click.command()
@click.option("--keep", is_flag=True, help="Keep everything, and print how to inspect it.")
@click.option("--remove", is_flag=True, help="Only remove what an earlier --keep left behind.")
def demo(keep: bool, remove: bool) -> None:
    """Demonstrate ebpflb with real traffic.

    Sets up a small cluster of network namespaces on this machine. Needs no Kubernetes and changes
    nothing else. Removes everything at the end, also if it is interrupted.
    """
    common.require_capabilities()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    left = _remove_ended(click.echo if remove else lambda line: None)
    if remove:
        if not left:
            click.echo("no demo was found")
        return
    name = f"{DEMO_PREFIX}-{os.getpid()}"
    with ExitStack() as stack:
        stack.callback(_remove, name)
        demo = Demo(stack.enter_context(Lab(name)), RUN / name, click.echo)
        _run(demo)
        if keep:
            demo.agent.start()
            _print_hints(demo)
            stack.pop_all()
            return
    click.echo("\neverything that the demo made is removed")


def _remove_ended(say: Callable[[str], None]) -> bool:
    """Removes the demos that were kept or killed: those whose process has ended, and says which.
    Returns whether there was any demo.

    One at a time does: what another one is removing would be gone in the middle.
    """
    lock = os.open(RUN, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        paths = [path for place in (RUN, NETNS, cgroup_root(), BPFFS) for path in place.glob("*")]
        found = {re.match(rf"{DEMO_PREFIX}-(\d+)\b", path.name) for path in paths}
        demos = sorted({(it[0], it[1]) for it in found if it})
        for name, pid in demos:
            if _is_demo(pid):
                say(f"{name} is still running: end its process {pid} first")
            else:
                _remove(name)
                say(f"removed: {name}")
        return bool(demos)
    finally:
        os.close(lock)


def _is_demo(pid: str) -> bool:
    """Whether this process runs a demo: of one that has ended another may have the number."""
    try:
        words = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"demo" in words and any(b"ebpflb" in word for word in words)


def _remove(name: str) -> None:
    """Stops and removes everything of one demo."""
    Lab(name).sweep()
    for state in BPFFS.glob(f"{name}-*") if BPFFS.is_dir() else ():
        unpin_all(StateDir(state))
    shutil.rmtree(RUN / name, ignore_errors=True)


def _run(demo: Demo) -> None:
    _heading("a node, a client, four web servers in network namespaces; `ebpflb run` on the node")
    demo.build()
    _heading(f"{CONNECTIONS_A_LINE} connections each to the service default/web: three endpoints")
    demo.connect()
    _heading("a fourth endpoint is a canary: it gets a tenth of the connections")
    demo.try_out()
    _heading("the service is scaled from three endpoints to four")
    demo.grow()
    _heading("ebpflb maps dump services slots")
    _print_maps(demo)
    _heading("a client outside connects to a NodePort: one backend on this node, one on another")
    demo.enter()
    _heading("the agent is killed with SIGKILL; new connections still work")
    demo.kill()


def _heading(text: str) -> None:
    click.secho(f"\n# {text}", bold=True)


def _print_maps(demo: Demo) -> None:
    maps = StateDir(demo.agent.paths.state).read_maps()
    for name, rows in dump_maps(maps, ("services", "slots")).maps.items():
        print_table(name, rows)


def _print_hints(demo: Demo) -> None:
    me, where = sys.argv[0], " ".join(demo.agent.where)
    node, pod = (f"nsenter --net=/run/netns/{it.netns}" for it in (demo.node, demo.client))
    procs = demo.client.cgroup / "cgroup.procs"
    request = f"{pod} {sys.executable} {TRAFFIC} request tcp {V4} {PORT} 100"
    _heading("the agent runs again, and everything is kept; to inspect it:")
    click.echo(f"""\
  {node} {me} status {where}
  {me} maps dump --state-dir {demo.agent.paths.state}
  sh -c 'echo $$ > {procs}; exec {request}'
  edit {demo.agent.manifests}/web.yaml
  {me} demo --remove""")
