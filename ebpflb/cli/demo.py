# SPDX-License-Identifier: Apache-2.0
"""``ebpflb demo``: the lab's story with headings, and the maps in between."""

import shutil
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import click

from ebpflb.cli import common
from ebpflb.cli.output import table
from ebpflb.datapath.attach.removal import unpin_all
from ebpflb.datapath.maps.pins import BPFFS, StateDir
from ebpflb.diagnose.dump import dump
from ebpflb.lab.demo import ASKED, PORT, TRAFFIC, V4, Demo
from ebpflb.lab.hosts import Lab

PREFIX = "ebpflb-demo"
FOLDER = Path("/run") / PREFIX


@click.command()
@click.option("--keep", is_flag=True, help="Leave it up at the end, and say how to look around.")
@click.option("--remove", is_flag=True, help="Only remove what --keep left.")
def demo(keep: bool, remove: bool) -> None:
    """Show it at work: a small cluster of network namespaces on this machine, real traffic.

    Needs no Kubernetes and touches no network but its own. At the end, also when it is
    interrupted, every trace is removed.
    """
    common.need_rights()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    _sweep()
    if remove:
        return
    with ExitStack() as stack:
        stack.callback(_sweep)
        story = Demo(stack.enter_context(Lab(PREFIX)), FOLDER, click.echo)
        _tell(story)
        if keep:
            story.agent.start()
            _say_how_to_look_around(story)
            stack.pop_all()
            return
    click.echo("\neverything that the demo made is gone")


def _sweep() -> None:
    """Ends and removes all of a demo, be it this one or one that was kept or killed."""
    Lab(PREFIX).sweep()
    for state in BPFFS.glob(f"{PREFIX}-*") if BPFFS.is_dir() else ():
        unpin_all(StateDir(state))
    shutil.rmtree(FOLDER, ignore_errors=True)


def _tell(story: Demo) -> None:
    _act("a node, a client, four web servers in network namespaces; `ebpflb run` on the node")
    story.build()
    _act(f"{ASKED} connections each to the service default/web: three endpoints")
    story.connect()
    _act("the service is scaled from three endpoints to four")
    story.grow()
    _act("ebpflb maps dump services slots")
    _dump(story)
    _act("a client outside the cluster asks a NodePort: an endpoint on this node, one on another")
    story.enter()
    _act("the agent is killed with SIGKILL; connections go on landing")
    story.kill()


def _act(heading: str) -> None:
    click.secho(f"\n# {heading}", bold=True)


def _dump(story: Demo) -> None:
    maps = StateDir(story.agent.paths.state).read_maps()
    for name, rows in dump(maps, ("services", "slots")).maps.items():
        table(name, rows)


def _say_how_to_look_around(story: Demo) -> None:
    me, where = sys.argv[0], " ".join(story.agent.where)
    node, pod = (f"nsenter --net=/run/netns/{it.netns}" for it in (story.node, story.client))
    procs = story.client.cgroup / "cgroup.procs"
    ask = f"{pod} {sys.executable} {TRAFFIC} ask tcp {V4} {PORT} 100"
    _act("the agent is back, and everything stays up; look around")
    click.echo(f"""\
  {node} {me} status {where}
  {me} maps dump --state-dir {story.agent.paths.state}
  sh -c 'echo $$ > {procs}; exec {ask}'
  edit {story.agent.manifests}/web.yaml
  {me} demo --remove""")
