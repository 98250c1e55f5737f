# SPDX-License-Identifier: Apache-2.0
"""``ebpflb cleanup``: leaves nothing behind."""

from pathlib import Path

import click

from ebpflb.cli import options
from ebpflb.datapath.state import State
from ebpflb.errors import NodeError
from ebpflb.node import ports
from ebpflb.serve import status
from ebpflb.settings import Places


@click.command()
@options.state_dir
@options.run_dir
def cleanup(state_dir: Path, run_dir: Path) -> None:
    """Take the programs off and remove the maps: services are no longer answered here.

    Connections that were translated at their socket stay open; flows of packets end. The cache of
    compiled programs stays.
    """
    options.need_root()
    places = options.places(state_dir, run_dir)
    if status.alive(places):
        words = status.read(places)
        who = f" (pid {words.pid})" if words else ""
        raise NodeError(f"an agent{who} still serves {places.state}: stop it first")
    State(places.state).remove()
    _release_ports(places)
    status.forget(places)
    click.echo(f"nothing is left of {places.state}")


def _release_ports(places: Places) -> None:
    """Raises NodeError where the kernel's list cannot be written."""
    try:
        ports.release(places.ports_file)
    except OSError as error:
        raise NodeError(f"{ports.RESERVED}: {error.strerror}") from error
