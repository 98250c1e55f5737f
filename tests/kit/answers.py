# SPDX-License-Identifier: Apache-2.0
"""The JSON of commands, with the texts of a table instead of their parts."""

import json
from typing import Any

SERVICE = ("namespace", "name", "port_name", "protocol")


def as_text(value: Any) -> Any:
    """A Service, a port of it, or a place as a table has it; of other values what is inside."""
    if isinstance(value, list):
        return [as_text(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {*SERVICE}:
        namespace, name, port, protocol = (value[it] for it in SERVICE)
        of_port = f":{port}" if port else ""
        return f"{namespace}/{name}{of_port}" + (f"/{protocol}" if protocol else "")
    if value.keys() == {"address", "port"}:
        address, port = value.values()
        if port is None:
            return address
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return {name: as_text(each) for name, each in value.items()}


def read(text: str) -> Any:
    """What a command has printed."""
    return as_text(json.loads(text))


def items(text: str) -> list[dict[str, Any]]:
    """The items of a list."""
    found: list[dict[str, Any]] = read(text)["items"]
    return found


def results(text: str) -> list[dict[str, Any]]:
    """Return the results of check and doctor, with the names of CheckResult; ``required``: what is
    missing is needed.
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
