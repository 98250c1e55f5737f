# SPDX-License-Identifier: Apache-2.0
"""The destinations of `ebpflb explain`: an address, or a Service by its name."""

from ipaddress import ip_address
from typing import Any

import pytest

from ebpflb.entries.services import Frontend, Range, ServiceEntry
from ebpflb.errors import NodeError
from ebpflb.model.addresses import Family
from ebpflb.model.services import PortName, Protocol
from ebpflb.tools.explain.asking import NamedService, find_frontend, parse_question

TCP, UDP = Protocol.TCP, Protocol.UDP


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("10.96.0.10:80", Frontend(ip_address("10.96.0.10"), 80, TCP)),
        ("[fd00::a]:53/udp", Frontend(ip_address("fd00::a"), 53, UDP)),
        ("default/web", NamedService("default", "web", "", None)),
        ("shop/web-2:https", NamedService("shop", "web-2", "https", None)),
        ("web.default.svc:80", NamedService("default", "web", "80", None)),
        ("1web.1shop.svc:80", NamedService("1shop", "1web", "80", None)),
        ("web.default.svc.cluster.local:53/udp", NamedService("default", "web", "53", UDP)),
    ],
)
def test_destinations_are_addresses_or_names(text: str, question: Frontend | NamedService) -> None:
    """Addresses have a port; names are written as in kubectl and DNS."""
    assert parse_question(text) == question


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fd00:96::10:80", "such as 10.96.0.10:80"),
        ("web", "such as 10.96.0.10:80"),
        ("10.96.0.10", "such as 10.96.0.10:80"),
        ("web.default:80/udp", '"web.default" is not an IP address'),
        ("10.96.0.10:65536", "port 65536 is not from 1 to 65535"),
        ("0.0.0.0:80", "0.0.0.0 is not the address of one host"),
        ("default/web/icmp", '"icmp" is not tcp, udp or sctp$'),
    ],
)
def test_wrong_questions(text: str, reason: str) -> None:
    """The error has the valid forms, or names the mistake."""
    with pytest.raises(ValueError, match=reason):
        parse_question(text)


def entry(number: int, *flags: str) -> ServiceEntry:
    return ServiceEntry(number, frozenset(flags), 0, 0, Range(0, 0), Range(0, 0))


class Rows:
    """A map, given by its rows."""

    def __init__(self, rows: dict[Any, Any]) -> None:
        self.items = rows.items


MAPS: Any = {
    "service_names": Rows(
        {
            1: PortName("default", "web", "http", TCP, Family.IPV4),
            2: PortName("default", "web", "https", TCP, Family.IPV4),
            3: PortName("default", "web", "http", TCP, Family.IPV6),
            4: PortName("shop", "one", "", UDP, Family.IPV4),
        }
    ),
    "services": Rows(
        {
            Frontend(ip_address("0.0.0.0"), 30080, TCP): entry(1),
            Frontend(ip_address("203.0.113.9"), 80, TCP): entry(1, "external"),
            Frontend(ip_address("fd00::a"), 80, TCP): entry(3),
            Frontend(ip_address("10.96.0.10"), 80, TCP): entry(1),
            Frontend(ip_address("10.96.0.10"), 443, TCP): entry(2),
            Frontend(ip_address("10.96.0.11"), 53, UDP): entry(4),
        }
    ),
}


@pytest.mark.parametrize(
    ("question", "frontend"),
    [
        ("default/web:80", "10.96.0.10:80"),
        ("default/web:https", "10.96.0.10:443"),
        ("shop/one", "10.96.0.11:53"),
        ("shop/one:53/udp", "10.96.0.11:53"),
    ],
)
def test_the_frontend_of_a_name(question: str, frontend: str) -> None:
    """The IPv4 cluster IP comes before IPv6 and before external addresses."""
    wanted = parse_question(question)
    assert isinstance(wanted, NamedService)
    assert str(find_frontend(MAPS, wanted)) == frontend


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ("default/web", "default/web: it has 443/tcp, 80/tcp; name one of them"),
        ("default/web:81", "no port 81; it has 443/tcp, 80/tcp"),
        ("shop/one:53/tcp", "it has 53/udp"),
        ("default/wep", "did you mean default/web"),
    ],
)
def test_no_frontend(question: str, reason: str) -> None:
    """The error lists the existing ports or Services."""
    wanted = parse_question(question)
    assert isinstance(wanted, NamedService)
    with pytest.raises(NodeError, match=reason):
        find_frontend(MAPS, wanted)
