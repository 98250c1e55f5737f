# SPDX-License-Identifier: Apache-2.0
"""What a rule in nft's JSON does with each packet of a connection, and in which states.

See FirewallRule. Raises ValueError, TypeError or LookupError for what is not as in
libnftables-json(5).
"""

from typing import Any

from ebpflb.diagnose.firewall.rules import STATES

_EACH = {
    "log": "logs",
    "limit": "limits",
    "quota": "counts",
    "queue": "queues",
    "mangle": "changes",
    "dup": "copies",
}
_SILENT = {"counter", "log", "accept", "drop", "reject", "jump", "goto"}  # they ask for nothing


def each(statements: list[dict[str, Any]]) -> str:
    """What asks for flags of TCP is about SYN; a counter without a verdict is there to count."""
    kinds = [next(iter(statement)) for statement in statements]
    if any(_left(statement) == ("tcp", "flags") for statement in statements):
        return ""
    done = next((word for kind, word in _EACH.items() if kind in kinds), "")
    return done or ("counts" if kinds and kinds[-1] == "counter" else "")


def states(statements: list[dict[str, Any]]) -> frozenset[str]:
    """Of a match for "ct state"."""
    for statement in statements:
        if _is_of_states(statement):
            asked = of_key(statement["match"]["left"], _words(statement["match"]["right"]))
            return STATES - asked if statement["match"]["op"] in ("!=", "!") else asked
    return frozenset()


def of_key(key: dict[str, Any], values: list[Any]) -> frozenset[str]:
    """Of a verdict map's key and values, or of a match's."""
    if key.get("ct", {}).get("key") != "state":
        return frozenset()
    return STATES.intersection(str(value) for value in values)


def asks_only_states(statements: list[dict[str, Any]]) -> bool:
    """Whether every packet of these states gets the rule's verdict, which is no return."""
    return all(_is_of_states(each) or next(iter(each)) in _SILENT for each in statements)


def _is_of_states(statement: dict[str, Any]) -> bool:
    return _left(statement) == ("ct", "state")


def _left(statement: dict[str, Any]) -> tuple[str, str]:
    """What a match reads: ("ct", "state"), ("tcp", "flags"); ("", "") for others."""
    left = statement.get("match", {}).get("left", {})
    left = left["&"][0] if "&" in left else left
    if "payload" in left:
        return left["payload"].get("protocol", ""), left["payload"].get("field", "")
    return ("ct", str(left["ct"].get("key"))) if "ct" in left else ("", "")


def _words(value: Any) -> list[Any]:
    """Of a state, a list of them, or a set."""
    if isinstance(value, dict):
        (value,) = value.values()
    return value if isinstance(value, list) else [value]
