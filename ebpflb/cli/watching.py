# SPDX-License-Identifier: Apache-2.0
"""``--watch``: shows a value again and again, until Ctrl-C."""

import sys
import time
from collections.abc import Callable
from typing import TypeVar

import click

_Value = TypeVar("_Value")

_CLEAR = "\x1b[H\x1b[2J"

watch_option = click.option(
    "-w",
    "--watch",
    type=click.FloatRange(min=0.1),
    is_flag=False,
    flag_value=2.0,
    default=None,
    metavar="[SECONDS]",
    help="Look again every 2 s, or every SECONDS, and show what has changed; until Ctrl-C.",
)


def show(
    read: Callable[[], _Value], print_: Callable[[_Value], None], seconds: float | None
) -> _Value:
    """Prints the value, which it returns; with ``seconds`` it watches, and ends the command."""
    if seconds:
        watch(read, print_, seconds)
        sys.exit(0)
    value = read()
    print_(value)
    return value


def watch(read: Callable[[], _Value], print_: Callable[[_Value], None], seconds: float) -> None:
    """On a terminal in place; elsewhere one output after the other, where they differ."""
    last = None
    try:
        while True:
            value = read()
            if value != last:
                if sys.stdout.isatty():
                    click.echo(_CLEAR, nl=False)
                print_(value)
                sys.stdout.flush()
            last = value
            time.sleep(seconds)
    except KeyboardInterrupt:
        return
