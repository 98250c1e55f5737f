# SPDX-License-Identifier: Apache-2.0
"""Events as lines: 80 columns, or as many as the terminal has; wide, JSON, YAML."""

import shutil
import sys

import click

from ebpflb.cli.output import COLUMNS, WIDE, print_row_as
from ebpflb.diagnose.event_words import Told
from ebpflb.errors import escaped

# The columns of the table, of 80; what a terminal has more goes to the last three.
_WIDTHS = {"TIME": 12, "VERDICT": 10, "HOOK": 7, "NS": 5, "FROM": 10, "FRONTEND": 14, "BACKEND": 16}
_ELASTIC = ("FROM", "FRONTEND", "BACKEND")
_LONGEST = 40  # characters that a column may have


class EventLines:
    """Prints an event as ``output`` says, each as soon as it is there."""

    def __init__(self, output: str) -> None:
        self._output, self._widths = output, dict(_WIDTHS)
        if output == "table" and sys.stdout.isatty():
            spare = shutil.get_terminal_size((COLUMNS, 24)).columns - COLUMNS
            for name in _ELASTIC:
                more = max(0, min(spare // len(_ELASTIC), _LONGEST - _WIDTHS[name]))
                self._widths[name] += more

    def head(self) -> None:
        if self._output == "table":
            self._line(dict(zip(self._widths, self._widths, strict=True)))

    def show(self, told: Told) -> None:
        if self._output in ("json", "yaml"):
            print_row_as(self._output, told)
        elif self._output == WIDE:
            click.echo(_wide(told))
        else:
            self._line(_cells(told))

    def _line(self, cells: dict[str, str]) -> None:
        parts = [_fitted(cells[name], width) for name, width in self._widths.items()]
        click.echo(" ".join(parts).rstrip())


def _cells(told: Told) -> dict[str, str]:
    return {
        "TIME": told.time[11:23],
        "VERDICT": told.verdict,
        "HOOK": told.hook,
        "NS": str(told.ns),
        "FROM": escaped(told.pod or _process(told) or told.client),
        "FRONTEND": told.frontend,
        "BACKEND": told.backend,
    }


def _wide(told: Told) -> str:
    """All that is known, with a word before what may be missing."""
    parts = {
        "process": _process(told),
        "pod": told.pod,
        "client": told.client,
        "device": told.device,
        "service": told.service,
        "frontend": told.frontend and f"{told.frontend}/{told.protocol}",
        "backend": told.backend,
        "endpoint": told.backend_pod,
    }
    said = [f"{name} {escaped(value)}" for name, value in parts.items() if value]
    return f"{told.time} {told.verdict:<16} {told.hook:<8} {told.ns:>6} ns  {'  '.join(said)}"


def _process(told: Told) -> str:
    return f"{told.process}/{told.pid}" if told.pid else ""


def _fitted(text: str, width: int) -> str:
    return f"{text:<{width}}" if len(text) <= width else f"{text[: width - 1]}…"
