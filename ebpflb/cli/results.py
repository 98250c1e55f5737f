# SPDX-License-Identifier: Apache-2.0
"""How ``ebpflb check`` and ``ebpflb doctor`` print what they looked at, and what they found."""

from collections.abc import Sequence

import click

from ebpflb.cli.output import Output, Row, print_list
from ebpflb.errors import escaped
from ebpflb.tools.node_checks import CheckResult

_COLOURS = {"ok": "green", "warning": "yellow", "WRONG": "red", "MISSING": "red"}


def print_results(results: Sequence[CheckResult], output: Output, lacking: str) -> None:
    """Prints a table, and below it what to do about each result that is not ok.

    Nothing without results.

    ``lacking``: the word for what is required and not ok.
    """
    if not (results or output.is_data):
        return
    rows = [_row(each, lacking, output) for each in results]
    names = (each.feature for each in results)
    print_list(rows, output, names=names, text_last=True, colours=_COLOURS)
    if output.has_sentences:
        for each in results:
            if each.remedy:
                click.echo(f"\n{each.feature}: {escaped(each.detail)}\n  {escaped(each.remedy)}")


def _row(result: CheckResult, lacking: str, output: Output) -> Row:
    row: dict[str, object] = {
        "result": "ok" if result.ok else lacking if result.required else "warning",
        "check": result.feature,
    }
    if output.is_whole:
        row |= {"required": result.required, "what_to_do": result.remedy}
    return {**row, "found": result.detail}
