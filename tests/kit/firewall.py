# SPDX-License-Identifier: Apache-2.0
"""A firewall of nft on a node of the lab."""

from collections.abc import Iterator
from contextlib import contextmanager

from ebpflb.lab.hosts import Host


@contextmanager
def rules(node: Host, text: str) -> Iterator[None]:
    """Return a table with these chains."""
    node.nft(f"table inet firewall {{\n{text}\n}}\n")
    try:
        yield
    finally:
        node.nft("delete table inet firewall\n")


def chain(hook: str, priority: str, *lines: str, policy: str = "accept") -> str:
    head = f"chain {hook} {{\ntype filter hook {hook} priority {priority}; policy {policy}\n"
    return "\n".join([head, *lines, "}"])
