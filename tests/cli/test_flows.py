# SPDX-License-Identifier: Apache-2.0
"""`ebpflb flows`: flows listed and deleted from the pins alone, by service and by client."""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from ebpflb.entries.services import BackendName, Frontend, Range, ServiceEntry
from ebpflb.kernel.attach.device_programs import unpin_all
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.state_dir import BPFFS, StateDir
from ebpflb.kernel.netfilter import conntrack
from ebpflb.model.addresses import Family
from ebpflb.model.services import PortName, Protocol
from tests.cli.conftest import Ebpflb
from tests.kernel.node import nodes
from tests.kit import answers
from tests.plan.flow_builders import Made

FLOWS = (Made(1), Made(2, masqueraded=True), Made(3, Protocol.UDP))
CLIENT = "198.51.100.7"


@pytest.fixture
def maps() -> Iterator[dict[str, Map]]:
    """Pinned maps with a service and its flows, but no agent."""
    made = StateDir(BPFFS / f"ebpflb-test-{os.getpid()}-flows")
    made.prepare()
    opened = made.open_maps()
    now = time.monotonic_ns()
    for flow in FLOWS:
        entries = flow.plain().items()
        table = opened["tcp_flows" if flow.protocol == Protocol.TCP else "other_flows"]
        table.write([(key, value._replace(last_seen=now, created=now)) for key, value in entries])
    name = PortName("default", "web", "tcp", Protocol.TCP, Family.IPV4)
    opened["service_names"].write([(7, name)])
    opened["backend_names"].write([(21, BackendName("node-1", "web-1"))])
    yield opened
    for each in opened.values():
        each.close()
    unpin_all(made)


@pytest.fixture
def pins(maps: dict[str, Map]) -> list[str]:
    return ["--state-dir", str(BPFFS / f"ebpflb-test-{os.getpid()}-flows")]


def test_columns_say_who_is_connected_to_whom(
    ebpflb: Ebpflb, pins: list[str], maps: dict[str, Map]
) -> None:
    done = ebpflb("flows", "list", *pins)
    lines = done.out.splitlines()
    assert lines[0].split() == ["PROTOCOL", "STATE", "CLIENT", "FRONTEND", "BACKEND"]
    assert any(f"{CLIENT}:3002" in it and "10.96.0.2:80" in it for it in lines), done.out
    assert sum("10.244.1.11:8080" in it for it in lines) == len(FLOWS)


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["--service", "default/web"], 3),
        (["--client", CLIENT], 3),
        (["--client", "2001:db8::1"], 0),
        (["--service", "default/web", "--client", "198.51.100.8"], 0),
    ],
)
def test_options_filter_the_flows(
    ebpflb: Ebpflb, pins: list[str], words: list[str], count: int
) -> None:
    """Options filter the flows; an empty result is not an error."""
    done = ebpflb("flows", "list", *words, *pins, "-o", "json")
    assert (done.status, len(answers.items(done.out))) == (0, count)
    flushed = ebpflb("flows", "flush", *words, *pins)
    assert (flushed.status, flushed.out.split()[2]) == (0, str(count))


def test_state_lists_flows_in_given_states(ebpflb: Ebpflb, pins: list[str]) -> None:
    """--state lists the flows in the given states; for an unknown state the error lists all
    states.
    """
    states = [
        flow["state"] for flow in answers.items(ebpflb("flows", "list", *pins, "-o", "json").out)
    ]
    first, other = sorted({*states})
    for words, count in (([first], states.count(first)), ([first, other], len(states))):
        given = [word for state in words for word in ("--state", state)]
        found = answers.items(ebpflb("flows", "list", *given, *pins, "-o", "json").out)
        assert [flow["state"] for flow in found] == [it for it in states if it in words]
        assert len(found) == count
    assert "'half' is not one of 'opening'" in ebpflb("flows", "list", "--state", "half").err


def test_a_flush_names_its_flows(ebpflb: Ebpflb, pins: list[str], maps: dict[str, Map]) -> None:
    """Only --all deletes all flows, if neither a service nor a client is given."""
    done = ebpflb("flows", "flush", *pins)
    assert done.status == 2 and "--all" in done.err
    assert [*maps["tcp_flows"].items()]


def test_netfilters_flows(ebpflb: Ebpflb, pins: list[str], maps: dict[str, Map]) -> None:
    """Flows of netfilter are listed, counted and flushed beside those of the flow tables."""
    frontend = Frontend(ip_address("127.0.0.7"), 53, Protocol.UDP)
    entry = ServiceEntry(7, frozenset(), 0, 0, Range(0, 0), Range(0, 0))
    maps["services"].write([(frontend, entry)])
    with nodes.fresh(f"ebpflb-test-{os.getpid()}-flowlist"):
        nodes.translate("127.0.0.7", 53)
        found = answers.items(ebpflb("flows", "list", *pins, "-o", "json").out)
        assert Counter(flow["engine"] for flow in found) == {"flows": 3, "netfilter": 1}
        assert len({tuple(flow) for flow in found}) == 1, "the same columns"
        (line,) = [
            x
            for x in ebpflb("flows", "list", *pins, "-o", "wide").out.splitlines()
            if "127.0.0.7:53" in x
        ]
        assert "default/web:tcp/TCP" in line
        assert "None" not in line
        said = json.loads(ebpflb("status", *pins, "-o", "json").out)
        assert said["conntrack"] == {"entries": 1, "limit": conntrack.limit()}
        assert ebpflb("flows", "flush", "--all", *pins).out == "flows flushed: 4 (9 entries)\n"
        assert conntrack.count() == 0
        assert json.loads(ebpflb("status", *pins, "-o", "json").out)["conntrack"] == {}


@pytest.mark.parametrize("command", ["list", "flush"])
def test_a_service_that_is_not_there_is_named(
    ebpflb: Ebpflb, pins: list[str], command: str
) -> None:
    """An unknown Service is an error, not an empty list, and a similar name is suggested."""
    done = ebpflb("flows", command, "--service", "default/wep", *pins)
    assert (done.status, done.out) == (1, "")
    said = "no Service default/wep is served here: did you mean default/web?"
    assert done.err == f"ebpflb: {said}\n"


@pytest.mark.parametrize("command", ["list", "flush"])
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--client", "198.51.100.256"], '"198.51.100.256" is not an IP address'),
        (["--service", "web"], '"web" is not NAMESPACE/NAME such as default/web'),
        (["--service", "a/b/c"], '"a/b/c" is not NAMESPACE/NAME such as default/web'),
    ],
)
def test_an_invalid_value_is_a_usage_error(
    ebpflb: Ebpflb, command: str, words: list[str], reason: str
) -> None:
    """An invalid value is a usage error that names the option."""
    done = ebpflb("flows", command, *words)
    assert (done.status, done.out) == (2, "")
    assert reason in done.err
    assert words[0] in done.err
