# SPDX-License-Identifier: Apache-2.0
"""Where an agent has the cluster's objects from, for others who want to list them as it does, and
what becomes of what they find.
"""

from ipaddress import ip_address, ip_network
from pathlib import Path

import msgspec

from ebpflb.model import external_ips, scheduler, served_services
from ebpflb.model.served_services import ServedServices
from ebpflb.options import REPAIR, ConntrackOptions, Options, Paths


class Origin(msgspec.Struct, frozen=True):
    """The options that decide which services an agent plans, and how netfilter translates. No
    secret is among them.
    """

    node_name: str
    cgroup: str
    manifests: str = ""
    kubeconfig: str = ""
    master: str = ""
    bind_address: str = ""
    serve_external_ips: bool = True
    external_ips: str = "all"
    nodeport_source_ranges: tuple[str, ...] = ()
    namespaces: str = ""
    services: str = ""
    scheduler: str = scheduler.RANDOM
    namespace_share: float = Options.namespace_share
    masquerade_mark: int = Options.masquerade_mark
    masquerade_ports: tuple[int, int] = Options.masquerade_ports
    be_liberal: bool = False  # with segments that conntrack finds invalid
    audit: str = REPAIR  # one of options.AUDITS

    def options(self, paths: Paths) -> Options:
        """The same as Options of an agent. Raises ValueError for what is none, as a file may have
        it.
        """
        if self.scheduler not in scheduler.SCHEDULERS:
            raise ValueError(f"{self.scheduler} is no scheduler")
        if not 0 < self.namespace_share <= 1:
            raise ValueError(f"{self.namespace_share} is no share")
        if not 0 < self.masquerade_mark < 1 << 32:
            raise ValueError(f"{self.masquerade_mark} is no mark")
        if not 0 < self.masquerade_ports[0] <= self.masquerade_ports[1] < 1 << 16:
            raise ValueError(f"{self.masquerade_ports} are no ports")
        return Options(
            paths=paths,
            node_name=self.node_name,
            cgroup=_path(self.cgroup),
            manifests=_path(self.manifests) if self.manifests else None,
            kubeconfig=_path(self.kubeconfig) if self.kubeconfig else None,
            master=self.master,
            bind_address=ip_address(self.bind_address) if self.bind_address else None,
            serve_external_ips=self.serve_external_ips,
            external_ips=external_ips.parse(self.external_ips),
            nodeport_source_ranges=tuple(map(ip_network, self.nodeport_source_ranges)),
            served=ServedServices(
                served_services.parse_namespaces(self.namespaces),
                served_services.parse(self.services),
            ),
            scheduler=self.scheduler,
            namespace_share=self.namespace_share,
            masquerade_mark=self.masquerade_mark,
            masquerade_ports=self.masquerade_ports,
            conntrack=ConntrackOptions(be_liberal=self.be_liberal),
        )


def _path(text: str) -> Path:
    if "\0" in text:
        raise ValueError("a path with a null character")
    return Path(text)


def origin(options: Options) -> Origin:
    """Of an agent's options."""
    return Origin(
        node_name=options.node_name,
        cgroup=str(options.cgroup),
        manifests=str(options.manifests or ""),
        kubeconfig=str(options.kubeconfig or ""),
        master=options.master,
        bind_address=str(options.bind_address or ""),
        serve_external_ips=options.serve_external_ips,
        external_ips=str(options.external_ips),
        nodeport_source_ranges=tuple(map(str, options.nodeport_source_ranges)),
        namespaces=served_services.show_namespaces(options.served.namespaces),
        services=served_services.show(options.served.selector),
        scheduler=options.scheduler,
        namespace_share=options.namespace_share,
        masquerade_mark=options.masquerade_mark,
        masquerade_ports=options.masquerade_ports,
        be_liberal=options.conntrack_wanted.be_liberal,
        audit=options.audit,
    )
