# SPDX-License-Identifier: Apache-2.0
"""What this machine and its Node are: its addresses, devices, ranges and settings.

It is small, so it is worked out whole wherever any of it is news; the maps see only what differs.
"""

from collections.abc import Mapping

from ebpflb.configuration import families
from ebpflb.configuration.families import Place
from ebpflb.configuration.fields import KubeProxyConfiguration
from ebpflb.datapath.datapath import Datapath
from ebpflb.model import devices, nodeports, nodes
from ebpflb.model.addresses import Address, Family, Network
from ebpflb.model.events import Kind
from ebpflb.model.picture import Picture
from ebpflb.node.devices import DevicesChanged
from ebpflb.node.families import supported
from ebpflb.plan.entries import Prefix
from ebpflb.plan.local import Local
from ebpflb.plan.spans import service_range
from ebpflb.serve import status
from ebpflb.serve.status import Words
from ebpflb.settings import Settings

_UNATTACHED = "device %s: %s; its packets are not served"


class Machine:
    """Writes what is known of this node; ``here`` is what the kernel last told of its devices."""

    def __init__(
        self, settings: Settings, datapath: Datapath, picture: Picture, words: Words
    ) -> None:
        self.settings = settings
        self.datapath = datapath
        self.picture = picture
        self.words = words
        self.here = DevicesChanged(())
        self.attached = False  # what programs there are, are in force
        self._written: object = None  # what the maps and programs of this node follow

    @property
    def listening(self) -> dict[Family, frozenset[Address]]:
        """Where health-check node ports listen, by family; missing ones: anywhere."""
        choice = self.settings.nodeport_addresses
        return nodeports.listening(self.here.addresses, choice, self.picture.primary)

    def check_families(self) -> None:
        """Raises ConfigurationError for addresses with which this Node could serve nothing."""
        found, primary = self.settings.configuration, next(iter(self.picture.primary), None)
        if primary is not None and isinstance(found, KubeProxyConfiguration):
            families.enforce(found, Place(primary, supported(), self._pod_cidrs()))

    @property
    def is_news(self) -> bool:
        """Whether ``write`` has something to do."""
        return self._found() != self._written or bool(self.words.unattached)

    def write(self, span: Mapping[Family, Prefix]) -> None:
        """Raises KernelError; then all of it is still news."""
        found = self._found()
        local = self._local()
        choice = self.settings.nodeport_addresses
        serving = nodeports.serving(self.here.addresses, choice, self.picture.primary)
        self.datapath.hold("node_addresses", dict.fromkeys(serving, 1))
        self.datapath.hold("devices", local.devices())
        if Kind.SERVICE_CIDR in self.picture.listed:
            ranges = map(service_range, self.picture.service_cidrs)
            self.datapath.hold("service_ranges", dict.fromkeys(ranges, 1))
        self.write_settings(span)
        if self.attached and self.datapath.programs:
            self._report(self.datapath.follow(local.served))
        self._written = found

    def write_settings(self, span: Mapping[Family, Prefix]) -> None:
        """``span`` covers all that is planned: before that is written."""
        self.datapath.set(self._local().settings(self.settings.fields, span))

    def attach(self) -> None:
        """Puts the loaded programs in force, if there are any. Raises KernelError."""
        if self.datapath.programs:
            self._report(self.datapath.attach(self.settings.cgroup, self._local().served))
        self.attached = True

    def forget(self) -> None:
        """What was written may not be there."""
        self._written = None

    def _found(self) -> object:
        picture = self.picture
        return self.here, picture.node, picture.service_cidrs, frozenset(picture.listed)

    def _local(self) -> Local:
        every, primary = self.here.devices, self.picture.primary
        served = devices.served(every, self.settings.devices)
        return Local(every, served, primary, self.settings.detector, self._pod_cidrs())

    def _pod_cidrs(self) -> tuple[Network, ...]:
        node = self.picture.node
        return nodes.pod_cidrs(node) if node else ()

    def _report(self, failed: dict[str, str]) -> None:
        self.words.unattached = status.renew(self.words.unattached, failed, _UNATTACHED)
