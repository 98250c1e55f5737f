# SPDX-License-Identifier: Apache-2.0
"""``ebpflb ui``: a page in the browser."""

from functools import partial
from pathlib import Path

import click

from ebpflb.cli import common
from ebpflb.errors import NodeError, in_words
from ebpflb.model.addresses import Address, parse_host_port

UI_PORT = 10251
_MISSING = (
    "the page needs packages that are not installed: run"
    " `pip install --requirement requirements/ui.txt` in ebpflb's repository"
)
_PORTS = range(2**16)  # 0: any that is free
_LEAST_TOKEN = 16  # characters


@click.command()
@click.option(
    "--listen",
    metavar="ADDRESS:PORT",
    callback=common.parsed(partial(parse_host_port, ports=_PORTS)),
    default=f"127.0.0.1:{UI_PORT}",
    show_default=True,
    help="Where to listen; other addresses than loopback need --token-file.",
)
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="EBPFLB_TOKEN_FILE",
    show_envvar=True,
    help="A file with the token that the page asks its users for.  [default: no token]",
)
@click.option(
    "--allow-host",
    "hosts",
    metavar="NAME",
    multiple=True,
    help="A name by which browsers reach this page, besides localhost; may be repeated.",
)
@common.state_dir
@common.run_dir
def ui(
    listen: tuple[Address, int],
    token_file: Path | None,
    hosts: tuple[str, ...],
    state_dir: Path,
    run_dir: Path | None,
) -> None:
    """Serve a page that shows this node in a browser, until Ctrl-C.

    Verdict, services with live rates, explain, live events, history. Nothing can be changed there.
    Other sites cannot read it: requests for other host names, or from other sites' pages, are
    refused. It needs the packages in requirements/ui.txt.

    \b
    $ ebpflb ui
    $ ebpflb ui --listen 127.0.0.1:8080
    $ ebpflb ui --listen 192.0.2.1:10251 --token-file /etc/ebpflb/token
    """
    token = _token(token_file) if token_file else ""
    if not listen[0].is_loopback and not token:
        raise NodeError(
            f"--listen {listen[0]}: everyone who reaches this address could read the node's "
            "state: add --token-file"
        )
    common.require_capabilities()
    try:
        from ebpflb_page.readings import Readings
        from ebpflb_page.web_server import Listen, serve
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ebpflb"):
            raise
        raise NodeError(_MISSING) from None
    where = Listen(str(listen[0]), listen[1], hosts, token)
    readings = Readings(state_dir, run_dir)
    serve(readings, state_dir, where, lambda url: click.echo(f"{url}  (press Ctrl-C to stop)"))


def _token(path: Path) -> str:
    """Return the token. Raises NodeError, whose text never contains the token."""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise NodeError(f"--token-file {path}: {in_words(error)}") from None
    if len(token) < _LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise NodeError(
            f"--token-file {path}: not a token of {_LEAST_TOKEN} or more printable characters of"
            " ASCII without spaces; `openssl rand -hex 32` makes one"
        )
    return token
