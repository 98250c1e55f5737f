# SPDX-License-Identifier: Apache-2.0
"""The options in the agent's status by which audit and doctor list and plan what the agent does.

They are texts; none contains a secret. Options with their default are left out. ``be_liberal`` is
one of conntrack's.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ebpflb.model.annotations import SCHEDULERS, parse_networks, show_networks
from ebpflb.model.services import (
    parse_external_ips,
    parse_namespaces,
    parse_requirements,
    show_namespaces,
    show_requirements,
)
from ebpflb.options import AUDITS, Options, Paths, parse_ports, show_ports


def _path(text: str) -> Path:
    if "\0" in text:
        raise ValueError("a path with a null character")
    return Path(text)


def _is_true(text: str) -> bool:
    return text == "True"


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text} is not one of {', '.join(choices)}")
        return text

    return parse


def _share(text: str) -> float:
    if not 0 < float(text) <= 1:
        raise ValueError(f"{text} is not a share")
    return float(text)


def _mark(text: str) -> int:
    if not 0 < int(text) < 1 << 32:
        raise ValueError(f"{text} is not a mark")
    return int(text)


# Field of Options -> how its value is shown, and how the text is parsed.
_FIELDS: dict[str, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    "node_name": (str, str),
    "cgroup": (str, _path),
    "manifests": (str, _path),
    "kubeconfig": (str, _path),
    "master": (str, str),
    "bind_address": (str, ip_address),
    "serve_external_ips": (str, _is_true),
    "external_ips": (str, parse_external_ips),
    "nodeport_source_ranges": (show_networks, parse_networks),
    "namespaces": (show_namespaces, parse_namespaces),
    "services": (show_requirements, parse_requirements),
    "scheduler": (str, _one_of(*SCHEDULERS)),
    "namespace_share": (str, _share),
    "masquerade_mark": (str, _mark),
    "masquerade_ports": (show_ports, parse_ports),
    "audit": (str, _one_of(*AUDITS)),
}
_BE_LIBERAL = "be_liberal"


def record(options: Options) -> dict[str, str]:
    """Return the recorded options of an agent, as texts by their names."""
    default = Options(options.paths, "", Path())
    texts = {
        name: show(getattr(options, name))
        for name, (show, _) in _FIELDS.items()
        if getattr(options, name) != getattr(default, name)
    }
    return texts | ({_BE_LIBERAL: ""} if options.conntrack_wanted.be_liberal else {})


def read_recorded(texts: Mapping[str, str], paths: Paths) -> Options:
    """Return an agent's options.

    Raises ValueError for texts that no agent has recorded, as a file may have.
    """
    known = {name: parse(texts[name]) for name, (_, parse) in _FIELDS.items() if name in texts}
    found = replace(Options(paths, "", Path()), **known)
    conntrack = replace(found.conntrack, be_liberal=_BE_LIBERAL in texts)
    return replace(found, conntrack=conntrack)
