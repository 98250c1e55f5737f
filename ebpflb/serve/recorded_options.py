# SPDX-License-Identifier: Apache-2.0
"""The options in the agent's status by which audit and doctor list and plan what the agent does.

They are texts; none contains a secret. Options with their default are left out. ``be_liberal`` is
one of conntrack's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ebpflb.model.annotations import SCHEDULERS
from ebpflb.options import AUDITS, Options, Paths, flags_of, parse_api_servers


def _path(text: str) -> Path:
    if "\0" in text:
        raise ValueError("a path with a null character")
    return Path(text)


def _one_of(values: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(f"{text} is not one of {', '.join(values)}")
        return text

    return parse


def _is_true(text: str) -> bool:
    return text == "True"


# Fields of Options, and how their recorded texts are parsed.
_PLAIN: dict[str, Callable[[str], Any]] = {
    "node_name": str,
    "cgroup": _path,
    "manifests": _path,
    "kubeconfig": _path,
    "master": str,
    "bind_address": ip_address,
    "serve_external_ips": _is_true,
    "scheduler": _one_of(SCHEDULERS),
    "masquerade_mark": int,
    "audit": _one_of(AUDITS),
}
# Fields whose flags parse and show the texts.
_AS_FLAGS = (
    "api_servers",
    "local_api_server",
    "external_ips",
    "nodeport_source_ranges",
    "namespaces",
    "services",
    "namespace_share",
    "masquerade_ports",
)
_FLAGS = {name: flag for name, flag, _ in flags_of(Options) if name in _AS_FLAGS}
_PARSERS = _PLAIN | {name: flag.parse for name, flag in _FLAGS.items() if flag.parse}
_PARSERS["api_servers"] = lambda text: parse_api_servers((text,))  # its flag can be repeated
_BE_LIBERAL = "be_liberal"


def record(options: Options) -> dict[str, str]:
    """Return the recorded options of an agent, as texts by their names."""
    default = Options(options.paths, "", Path())
    texts = {
        name: str(_FLAGS[name].shown(value) if name in _FLAGS else value)
        for name in _PARSERS
        if (value := getattr(options, name)) != getattr(default, name)
    }
    return texts | ({_BE_LIBERAL: ""} if options.conntrack_wanted.be_liberal else {})


def read_recorded(texts: Mapping[str, str], paths: Paths) -> Options:
    """Return an agent's options.

    Raises ValueError for texts that no agent has recorded, as a file may have.
    """
    known = {name: parse(texts[name]) for name, parse in _PARSERS.items() if name in texts}
    found = replace(Options(paths, "", Path()), **known)
    conntrack = replace(found.conntrack, be_liberal=_BE_LIBERAL in texts)
    return replace(found, conntrack=conntrack)
