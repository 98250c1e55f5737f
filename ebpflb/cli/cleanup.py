# SPDX-License-Identifier: Apache-2.0
"""``ebpflb cleanup``: remove everything that ebpflb, or a stopped kube-proxy, has set up."""

from pathlib import Path

import click

from ebpflb.cli import common
from ebpflb.errors import NodeError
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.attach.device_programs import attached_devices, unpin_all
from ebpflb.kernel.maps.state_dir import StateDir, StateLock, why_hidden
from ebpflb.kernel.netfilter import flowtable, nft, watch
from ebpflb.kernel.netfilter.table import TABLE
from ebpflb.kernel.node import kube_proxy as kube_proxy_leftovers
from ebpflb.kernel.node import kube_proxy as kube_proxy_watch
from ebpflb.kernel.node import namespaces, sysctls
from ebpflb.kernel.node.kube_proxy import Leftover, LeftoverSurvey
from ebpflb.options import Paths
from ebpflb.serve import status
from ebpflb.tools import pins
from ebpflb.tools.firewall import dropping

NOTHING = "nothing of kube-proxy was found"
LATER = "run this command again later"
STAYS = f"is kept while it still translates connections; {LATER}"
MODE_IPVS = "what mode ipvs left is kept while IPVS has connections:"


@click.command()
@common.agents_paths
@click.option("--kube-proxy", is_flag=True, help="Remove what kube-proxy left behind, not ebpflb.")
@click.option("--dry-run", is_flag=True, help="Only print what to remove.")
@click.option(
    "--force",
    is_flag=True,
    help="With --kube-proxy: also if kube-proxy is running or open connections may break.",
)
def cleanup(paths: Paths, kube_proxy: bool, dry_run: bool, force: bool) -> None:
    """Detach ebpflb's programs and remove its maps.

    Services do not work on this node afterwards, unless kube-proxy serves them.

    Connections that were translated at their socket, or by netfilter, stay open; those of the flow
    tables break. The table of nftables stays as long as connections need it, unless kube-proxy's
    rules serve these. The cache of compiled programs and the sysctls of conntrack are
    left as they are.

    With --kube-proxy: remove the rules, chains, tables, ipsets, virtual servers and the device
    that kube-proxy left in this network namespace, and set the sysctls of IPVS back. All other
    rules are kept. While IPVS has connections everything that mode ipvs left stays.

    \b
    $ ebpflb cleanup --dry-run
    $ ebpflb cleanup
    $ ebpflb cleanup --kube-proxy --dry-run
    """
    if force and not kube_proxy:
        raise click.UsageError("--force needs --kube-proxy")
    if kube_proxy:
        remove_kube_proxy(paths, dry_run=dry_run, force=force)
    else:
        remove_ebpflb(paths, dry_run=dry_run)


def remove_all(paths: Paths) -> None:
    """Remove everything that kube-proxy's flag --cleanup removes, and everything of ebpflb. Raises
    NodeError.
    """
    remove_ebpflb(paths)
    remove_kube_proxy(paths)


def remove_ebpflb(paths: Paths, *, dry_run: bool = False) -> None:
    """Remove everything that ebpflb has set up; with ``dry_run`` only print it.

    Raises KernelError, or NodeError if an agent runs or the state directory is hidden.
    """
    if hidden := why_hidden(paths.state):
        raise NodeError(hidden)
    lock = StateLock(paths.state)
    is_there = paths.state.is_dir()
    if is_there and any(paths.state.iterdir()) and not paths.run.is_dir():
        lost = "it records which source ports to give back to the kernel"
        raise NodeError(
            f"{paths.run} is not here, and {lost}: give --run-dir (or make it, if lost)"
        )
    if status.is_running(paths) or (is_there and not lock.take()):
        last = status.read(paths)
        who = f" (pid {last.pid})" if last else ""
        raise NodeError(f"an agent{who} still serves {paths.state}: stop it first")
    try:
        _require_namespace(paths.state)
        if dry_run:
            _print_ebpflb(paths)
            return
        unpin_all(StateDir(paths.state))
    finally:
        lock.release()
    _release_tables()
    _release_ports(paths)
    sysctls.be_strict(paths.liberal_file)
    status.remove(paths)
    click.echo(f"nothing is left of {paths.state}")


def _print_ebpflb(paths: Paths) -> None:
    """Print what ``remove_ebpflb`` would remove now."""
    state = StateDir(paths.state)
    hooks, devices = len(cgroup_links.attached(state)), sum(attached_devices(state).values())
    tables = (flowtable.TABLE, TABLE, watch.HOLD)
    found = [
        hooks and f"programs at {hooks} socket hooks",
        devices and f"programs at {devices} devices",
        paths.state.is_dir() and f"the maps in {paths.state}",
        *(f"{table}, when no connection needs it" for table in tables if nft.exists(table)),
        paths.ports_file.exists() and "the reservation of ports to masquerade with",
        paths.liberal_file.exists() and f"the value 1 of the sysctl {sysctls.LIBERAL}",
        *(str(path) for path in status.files_of(paths) if path.exists()),
    ]
    for what in filter(None, found):
        click.echo(f"would be removed: {what}")
    if not any(found):
        click.echo(f"nothing is left of {paths.state}")


def _require_namespace(state: Path) -> None:
    """Raise NodeError if the agent serves another network namespace: its filters and tables would
    stay.

    If that namespace is gone, its filters and tables are gone too.
    """
    with pins.maps_if_any(state) as maps:
        if maps and namespaces.by_cookie(maps["settings"].get(0).host_netns):
            pins.require_namespace(maps)


def remove_kube_proxy(paths: Paths, *, dry_run: bool = False, force: bool = False) -> None:
    """Remove what kube-proxy left behind, and print a line for each part.

    Raises NodeError if some of it stays.
    """
    found = kube_proxy_watch.detect()
    if found.running and not (force or dry_run):
        raise NodeError(f"kube-proxy is running ({found.evidence}): stop it first, or use --force")
    if found.rules and not (force or dry_run):
        _require_all_served(paths)
    survey = kube_proxy_leftovers.survey(force=force)
    if dry_run:
        _print_dry_run(survey)
        _print_dropping(paths)
        return
    _keep_nat(survey, force=force)
    failed = [reason for leftover in survey.removable for reason in _remove(leftover)]
    _release_nat(survey)
    _print_not_removed(survey)
    if failed or survey.unreadable:
        raise NodeError("some of what kube-proxy left behind could not be removed: see above")
    if not survey.in_use:
        click.echo("nothing is left of kube-proxy" if survey.removable else NOTHING)
    if survey.removable and not (found.running or cgroup_links.attached(StateDir(paths.state))):
        missing = f"ebpflb does not serve from {paths.state}"
        click.echo(f"warning: {missing}: services do not work on this node now")
    _print_dropping(paths)


def _print_dropping(paths: Paths) -> None:
    """Print the traffic that only kube-proxy's rules accept."""
    for each in dropping(paths.state):
        click.echo(f"warning: {each}")


def _require_all_served(paths: Paths) -> None:
    """Raise NodeError if the running agent leaves Services or devices to kube-proxy's rules."""
    last = status.read(paths) if status.is_running(paths) else None
    if last and last.devices_to_come:
        raise NodeError(
            f"{last.devices_to_come} devices have no programs yet, and need kube-proxy's rules: "
            "try again when `ebpflb status` shows no devices to come, or use --force"
        )
    if last and last.left_to_kube_proxy:
        left = last.left_to_kube_proxy
        raise NodeError(f"{left} need kube-proxy's rules: serve all by ebpflb, or use --force")


def _print_dry_run(survey: LeftoverSurvey) -> None:
    for leftover in survey.removable:
        click.echo(f"would be removed: {leftover.what}")
    _print_not_removed(survey)
    if not (survey.removable or survey.in_use):
        click.echo(NOTHING)


def _print_not_removed(survey: LeftoverSurvey) -> None:
    if survey.in_use:
        click.echo(f"{MODE_IPVS} {survey.in_use}; {LATER}, or use --force")
    for rules in survey.retained:
        click.echo(f"kept: {rules}")
    for source in survey.unreadable:
        click.echo(f"cannot be checked: {source}", err=True)


def _remove(leftover: Leftover) -> list[str]:
    """Remove one part; return the error if that fails."""
    try:
        leftover.remove()
    except NodeError as error:
        click.echo(f"not removed: {leftover.what}: {error}", err=True)
        return [str(error)]
    click.echo(f"removed: {leftover.what}")
    return []


def _keep_nat(survey: LeftoverSurvey, *, force: bool) -> None:
    """Keep NAT working for open connections when the last NAT rules are removed.

    Raises NodeError.
    """
    if not survey.removable or not watch.has_dnat_connections():
        return
    try:
        watch.keep_nat_hooks()
    except NodeError as error:
        if not force:
            hint = "connections through kube-proxy would break: wait until they end, or use --force"
            raise NodeError(f"{error}; {hint}") from error


def _release_nat(survey: LeftoverSurvey) -> None:
    """Remove what ``_keep_nat`` has set up, unless a connection still needs it."""
    if nft.exists(watch.HOLD):
        gone = watch.release_when_unused(watch.HOLD)
        click.echo(f"removed: {watch.HOLD}" if gone else f"{watch.HOLD} {STAYS}")


def _release_tables() -> None:
    """Remove the tables that keep NAT working, unless open connections would end.

    If kube-proxy has rules, the tables are not needed, because those rules keep NAT working. Raises
    NodeError.
    """
    nft.delete(flowtable.TABLE)
    tables = [table for table in (TABLE, watch.HOLD) if nft.exists(table)]
    others = bool(tables) and bool(kube_proxy_leftovers.visible_rules())
    for table in tables:
        if others:
            nft.delete(table)
        elif not watch.release_when_unused(table):
            click.echo(f"{table} {STAYS}")


def _release_ports(paths: Paths) -> None:
    """Remove our ports from the kernel's list of reserved ports. Raises NodeError if the list
    cannot be written.
    """
    try:
        sysctls.release_ports(paths.ports_file)
    except OSError as error:
        where = error.filename or sysctls.RESERVED
        raise NodeError(f"{where}: {error.strerror}") from error
