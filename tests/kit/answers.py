# SPDX-License-Identifier: Apache-2.0
"""The JSON of commands."""

import json
from typing import Any


def items(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text)["items"]
    return found


def results(text: str) -> list[dict[str, Any]]:
    """Return the results of check and doctor, with the names of CheckResult; with ``required`` a
    missing feature is wrong instead of a warning.
    """
    names = {"check": "feature", "found": "detail", "what_to_do": "remedy"}
    return [
        {
            "ok": row["result"] == "ok",
            "required": row["result"] in ("WRONG", "MISSING"),
            **{name: row[word] for word, name in names.items()},
        }
        for row in items(text)
    ]


def dumped(text: str) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of `maps dump`, by map."""
    maps: dict[str, list[dict[str, Any]]] = {}
    for row in items(text):
        maps.setdefault(row.pop("map"), []).append(row)
    return maps
