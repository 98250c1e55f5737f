# SPDX-License-Identifier: Apache-2.0
"""What in a configuration makes no sense: all of it, each with its path (kube-proxy.md 15).

The rules are kube-proxy's, with their oddities: mode ipvs alone is asked about section ipvs, and
clusterCIDR is looked at in mode ClusterCIDR alone.
"""

import re
from collections.abc import Iterator

from ebpflb.configuration import addresses
from ebpflb.configuration.config_file import Wrong
from ebpflb.configuration.fields import IPVS, Conntrack, KubeProxyConfiguration, join, value_at
from ebpflb.model import nodeports
from ebpflb.model.addresses import family, parse_address, parse_network
from ebpflb.model.locality import Mode

MODES = ("iptables", "ipvs", "nftables")
LOG_FORMATS = ("text", "json")

_PORT_RANGE = re.compile(r"(\d{1,5})(?:([-+])(\d{1,5}))?", re.ASCII)
_LAST_PORT = 65535

_NEEDED = {
    Mode.BRIDGE.value: "detectLocal.bridgeInterface",
    Mode.NAME_PREFIX.value: "detectLocal.interfaceNamePrefix",
}


def check(found: KubeProxyConfiguration) -> Iterator[Wrong]:
    """Nothing, if all is well."""
    yield from _one_of("mode", found.mode, ("", *MODES))
    yield from _periods(found)
    yield from _numbers(found)
    yield from _durations("conntrack", found.conntrack)
    if found.mode == "ipvs":
        yield from _durations("ipvs", found.ipvs)
        yield from _networks("ipvs.excludeCIDRs", found.ipvs.exclude_cidrs)
    yield from _addresses(found)
    yield from _nodeport_addresses(found.node_port_addresses)
    yield from _detect_local(found)
    yield from _one_of("logging.format", found.logging.format, LOG_FORMATS)
    if found.hostname_override and not found.hostname_override.strip():
        yield Wrong("hostnameOverride", "is blank")
    if found.port_range and not _is_port_range(found.port_range):
        yield Wrong("portRange", f'"{found.port_range}" is no range of ports such as 300-2000')


def _periods(found: KubeProxyConfiguration) -> Iterator[Wrong]:
    """Those of the mode."""
    section = found.mode if found.mode in MODES else MODES[0]
    longest, shortest = found.of_mode.sync_period, found.of_mode.min_sync_period
    if longest <= 0:
        yield Wrong(f"{section}.syncPeriod", f"{longest} is not greater than 0")
    if shortest < 0:
        yield Wrong(f"{section}.minSyncPeriod", f"{shortest} is less than 0")
    if shortest > longest:
        reason = f"{longest} is less than {section}.minSyncPeriod, {shortest}"
        yield Wrong(f"{section}.syncPeriod", reason)
    if found.config_sync_period <= 0:
        yield Wrong("configSyncPeriod", f"{found.config_sync_period} is not greater than 0")


def _numbers(found: KubeProxyConfiguration) -> Iterator[Wrong]:
    limits = {
        "iptables.masqueradeBit": (0, 31),
        "oomScoreAdj": (-1000, 1000),
        "conntrack.maxPerCore": (0, None),
        "conntrack.min": (0, None),
        "clientConnection.burst": (0, None),
    }
    if found.mode == "nftables":
        limits["nftables.masqueradeBit"] = (0, 31)
    for path, (least, most) in limits.items():
        value = value_at(found, path)
        if most is not None and not least <= value <= most:
            yield Wrong(path, f"{value} is not in {least}..{most}")
        elif value < least:
            yield Wrong(path, f"{value} is less than {least}")


def _durations(path: str, section: Conntrack | IPVS) -> Iterator[Wrong]:
    names = {
        "conntrack": ("tcpEstablishedTimeout", "tcpCloseWaitTimeout", "udpTimeout"),
        "ipvs": ("tcpTimeout", "tcpFinTimeout", "udpTimeout"),
    }[path] + (("udpStreamTimeout",) if path == "conntrack" else ())
    for name in names:
        value = value_at(section, name)
        if value < 0:
            yield Wrong(join(path, name), f"{value} is less than 0")


def _addresses(found: KubeProxyConfiguration) -> Iterator[Wrong]:
    try:
        parse_address(found.bind_address)
    except ValueError as error:
        yield Wrong("bindAddress", str(error))
    for path in ("healthzBindAddress", "metricsBindAddress"):
        text = value_at(found, path)
        try:
            if text:
                addresses.parse(text)
        except ValueError as error:
            yield Wrong(path, str(error))


def _nodeport_addresses(choice: tuple[str, ...]) -> Iterator[Wrong]:
    keyword = nodeports.PRIMARY[0]
    if keyword in choice and choice != nodeports.PRIMARY:
        index = choice.index(keyword)
        yield Wrong(f"nodePortAddresses[{index}]", f"'{keyword}' stands alone, without CIDRs")
    yield from _networks("nodePortAddresses", choice, but=keyword)


def _networks(path: str, texts: tuple[str, ...], but: str = "") -> Iterator[Wrong]:
    for index, text in enumerate(texts):
        try:
            if not but or text != but:
                parse_network(text)
        except ValueError as error:
            yield Wrong(join(path, index), str(error))


def _detect_local(found: KubeProxyConfiguration) -> Iterator[Wrong]:
    mode = found.detect_local_mode
    yield from _one_of("detectLocalMode", mode, tuple(each.value for each in Mode))
    if mode in _NEEDED and not value_at(found, _NEEDED[mode]):
        yield Wrong(_NEEDED[mode], f"is empty, and mode {mode} needs it")
    if mode == Mode.CLUSTER_CIDR and found.cluster_cidr:
        texts = cluster_cidrs(found)
        wrong = list(_networks("clusterCIDR", texts))
        yield from (Wrong("clusterCIDR", each.reason) for each in wrong)
        if not wrong and len({family(parse_network(text)) for text in texts}) < len(texts):
            reason = f'"{found.cluster_cidr}" has more than one CIDR of a family'
            yield Wrong("clusterCIDR", reason)


def cluster_cidrs(found: KubeProxyConfiguration) -> tuple[str, ...]:
    """One CIDR, or one of each family with a comma between."""
    return tuple(text.strip() for text in found.cluster_cidr.split(","))


def _one_of(path: str, text: str, known: tuple[str, ...]) -> Iterator[Wrong]:
    if text not in known:
        yield Wrong(path, f'"{text}" is none of {", ".join(filter(None, known))}')


def _is_port_range(text: str) -> bool:
    """PORT, FIRST-LAST or FIRST+COUNT."""
    found = _PORT_RANGE.fullmatch(text)
    if not found:
        return False
    first, count = int(found[1]), int(found[3] or 0)
    last = {"-": count, "+": first + count}.get(found[2], first)
    return first <= last <= _LAST_PORT
