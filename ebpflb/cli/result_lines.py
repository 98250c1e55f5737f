# SPDX-License-Identifier: Apache-2.0
"""The lines of ``ebpflb check`` and ``ebpflb doctor``: what was looked at, and what was found."""

from collections.abc import Iterator, Sequence
from textwrap import wrap

import click

from ebpflb.cli.output import COLUMNS, WIDE, print_narrow_table
from ebpflb.diagnose.check_result import CheckResult
from ebpflb.errors import escaped

_INDENT = " " * 9


def print_results(results: Sequence[CheckResult], output: str, lacking: str) -> None:
    """``lacking``: the word for what is required and not ok. ``output``: "table" or WIDE."""
    if output == WIDE:
        print_narrow_table("this node", [_row(it, lacking) for it in results], wide=True)
    else:
        click.echo("\n".join(line for each in results for line in _lines(each, lacking)))


def _lines(result: CheckResult, lacking: str) -> Iterator[str]:
    """One of 80 columns if it is ok; else also what to do."""
    first = f"{_word(result, lacking):8} {result.feature}: {escaped(result.detail)}"
    if result.ok:
        yield first if len(first) <= COLUMNS else f"{first[: COLUMNS - 1]}…"
    else:
        yield from wrap(first, COLUMNS, subsequent_indent=_INDENT)
        yield from wrap(
            escaped(result.remedy), COLUMNS, initial_indent=_INDENT, subsequent_indent=_INDENT
        )


def _row(result: CheckResult, lacking: str) -> dict[str, str]:
    return {
        "": _word(result, lacking),
        "what": result.feature,
        "found": result.detail,
        "what to do, or what is lost": result.remedy,
    }


def _word(result: CheckResult, lacking: str) -> str:
    if result.ok:
        return "ok"
    return lacking if result.required else "warning"
