# SPDX-License-Identifier: Apache-2.0
"""``ebpflb demo``: the lab's story with headings, and the maps in between."""

import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click

from ebpflb.cli import options
from ebpflb.cli.output import table
from ebpflb.datapath.state import State
from ebpflb.diagnose.dump import dump
from ebpflb.lab.demo import ASKED, V4, Demo
from ebpflb.lab.hosts import Lab

PREFIX = "ebpflb-demo"


@click.command()
@click.option("--keep", is_flag=True, help="Leave it up at the end, and say how to look around.")
def demo(keep: bool) -> None:
    """Show it at work: a small cluster of network namespaces on this machine, real traffic.

    Needs no Kubernetes and touches no network but its own. At the end, also when it is
    interrupted, every trace is removed.
    """
    options.need_root()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{PREFIX}-")))
        lab = stack.enter_context(Lab(PREFIX))
        story = Demo(lab, folder, click.echo)
        stack.callback(story.close)
        _tell(story)
        if keep:
            _stay(story)
    click.echo("\neverything that the demo made is gone")


def _tell(story: Demo) -> None:
    _act("a node, a client, four web servers in network namespaces; `ebpflb run` on the node")
    story.build()
    _act(f"{ASKED} connections each to the service default/web: three endpoints")
    story.connect()
    _act("the service is scaled from three endpoints to four")
    story.grow()
    _act("ebpflb maps dump services slots")
    _dump(story)
    _act("the agent is killed with SIGKILL; connections go on landing")
    story.kill()


def _act(heading: str) -> None:
    click.secho(f"\n# {heading}", bold=True)


def _dump(story: Demo) -> None:
    maps = State(story.agent.places.state).read_maps()
    for name, rows in dump(maps, ("services", "slots")).maps.items():
        table(name, rows)


def _stay(story: Demo) -> None:
    """Brings the agent back and waits; the end of the wait removes everything."""
    story.agent.start()
    where = " ".join(story.agent.where)
    enter = f"nsenter --net=/run/netns/{story.client.netns}"
    procs = story.client.cgroup / "cgroup.procs"
    _act("it stays up; look around from another terminal")
    click.echo(f"""\
  ebpflb status {where}
  ebpflb maps dump {where.split(" --run-dir")[0]}
  sh -c 'echo $$ > {procs}; {enter} curl http://{V4}'    (HTTP/0.9: add --http0.9)
  edit {story.agent.manifests}/web.yaml
""")
    click.pause("press a key, or end with Ctrl-C, and everything is removed")
