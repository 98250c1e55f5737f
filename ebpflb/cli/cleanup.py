# SPDX-License-Identifier: Apache-2.0
"""``ebpflb cleanup``: leaves nothing behind, of ours or of a kube-proxy that has gone."""

from pathlib import Path

import click

from ebpflb.cli import common
from ebpflb.datapath.attach import cgroup_links
from ebpflb.datapath.attach.removal import unpin_all
from ebpflb.datapath.maps.pins import StateDir
from ebpflb.errors import NodeError
from ebpflb.node import kube_proxy_leftovers, kube_proxy_watch, nat, nft, reserved_ports
from ebpflb.node.kube_proxy_leftovers import Leftover, Survey
from ebpflb.options import Paths
from ebpflb.serve import status

NOTHING = "nothing of kube-proxy is here"


@click.command()
@common.state_dir
@common.run_dir
@click.option("--kube-proxy", is_flag=True, help="Remove what a kube-proxy left, nothing of ours.")
@click.option("--dry-run", is_flag=True, help="With --kube-proxy: only say what would go.")
@click.option(
    "--force",
    is_flag=True,
    help="With --kube-proxy: also while one runs, and though open connections may end.",
)
def cleanup(state_dir: Path, run_dir: Path, kube_proxy: bool, dry_run: bool, force: bool) -> None:
    """Take the programs off and remove the maps: services are no longer answered here.

    Connections that were translated at their socket stay open; flows of packets end. The cache of
    compiled programs stays.

    With --kube-proxy: remove the rules, chains, tables, ipsets, virtual servers and the device
    that a kube-proxy left in this network namespace. Others' rules stay as they are.
    """
    if (dry_run or force) and not kube_proxy:
        raise click.UsageError("--dry-run and --force go with --kube-proxy")
    common.need_rights()
    paths = common.paths(state_dir, run_dir)
    if kube_proxy:
        remove_kube_proxy(paths, dry_run=dry_run, force=force)
    else:
        remove_ours(paths)


def everything(paths: Paths) -> None:
    """As kube-proxy's --cleanup: ours, and what a kube-proxy left. Raises NodeError."""
    remove_ours(paths)
    remove_kube_proxy(paths)


def remove_ours(paths: Paths) -> None:
    """All that ebpflb made. Raises NodeError while an agent serves it, KernelError."""
    if status.is_running(paths):
        last = status.read(paths)
        who = f" (pid {last.pid})" if last else ""
        raise NodeError(f"an agent{who} still serves {paths.state}: stop it first")
    unpin_all(StateDir(paths.state))
    nft.release_nat_hooks()
    _release_ports(paths)
    status.remove(paths)
    click.echo(f"nothing is left of {paths.state}")


def remove_kube_proxy(paths: Paths, *, dry_run: bool = False, force: bool = False) -> None:
    """What a kube-proxy left, line by line. Raises NodeError where some of it is still there."""
    found = kube_proxy_watch.detect()
    if found.running and not (force or dry_run):
        raise NodeError(f"kube-proxy still runs ({found.evidence}): stop it first, or --force")
    survey = kube_proxy_leftovers.survey()
    if dry_run:
        _foretell(survey)
        return
    _hold_nat(survey, force=force)
    failed = [reason for leftover in survey.removable for reason in _remove(leftover)]
    _let_nat_go(survey)
    _tell_rest(survey)
    if failed or survey.unreadable:
        raise NodeError("not all that kube-proxy left could be removed: see above")
    click.echo("nothing is left of kube-proxy" if survey.removable else NOTHING)
    if survey.removable and not cgroup_links.attached(StateDir(paths.state)):
        click.echo(f"note: ebpflb does not serve at {paths.state}: nobody answers services now")


def _foretell(survey: Survey) -> None:
    for leftover in survey.removable:
        click.echo(f"would be removed: {leftover.what}")
    _tell_rest(survey)
    if not survey.removable:
        click.echo(NOTHING)


def _tell_rest(survey: Survey) -> None:
    for kept in survey.retained:
        click.echo(f"left alone: {kept}")
    for unseen in survey.unreadable:
        click.echo(f"cannot be looked at: {unseen}", err=True)


def _remove(leftover: Leftover) -> list[str]:
    """Why not, if it did not go; the rest goes on."""
    try:
        leftover.remove()
    except NodeError as error:
        click.echo(f"still here: {leftover.what}: {error}", err=True)
        return [str(error)]
    click.echo(f"removed: {leftover.what}")
    return []


def _hold_nat(survey: Survey, *, force: bool) -> None:
    """Before what may be the last rules that keep conntrack at work. Raises NodeError."""
    if not survey.removable or not nat.has_dnat_connections():
        return
    try:
        nft.keep_nat_hooks()
    except NodeError as error:
        if not force:
            ends = "open connections through kube-proxy's rules would end: wait, or --force"
            raise NodeError(f"{error}; {ends}") from error


def _let_nat_go(survey: Survey) -> None:
    """When nobody needs it any more."""
    if not nft.keeps_nat_hooks():
        return
    name = nft.Name("inet", nft.NAT_TABLE)
    if nat.has_dnat_connections():
        click.echo(f"{name} stays as long as connections are translated; run this again later")
    else:
        nft.release_nat_hooks()
        click.echo(f"removed: {name}")


def _release_ports(paths: Paths) -> None:
    """Raises NodeError where the kernel's list cannot be written."""
    try:
        reserved_ports.release(paths.ports_file)
    except OSError as error:
        raise NodeError(f"{reserved_ports.RESERVED}: {error.strerror}") from error
