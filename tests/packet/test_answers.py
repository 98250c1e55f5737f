# SPDX-License-Identifier: Apache-2.0
"""Questions for load balancer addresses become their answers; everything else goes on unchanged."""

import os
import time
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import (
    ICMPv6ND_NA,
    ICMPv6ND_NS,
    ICMPv6NDOptDstLLAddr,
    ICMPv6NDOptSrcLLAddr,
    IPv6,
)
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Packet

from ebpflb.kernel.attach.uplink_program import Given
from ebpflb.kernel.maps import bpf_map, state_dir
from ebpflb.kernel.maps.layout import ANSWERED
from ebpflb.kernel.programs import compiler, loader
from ebpflb.kernel.programs.loader import PASS, REDIRECT, Ran
from ebpflb.kernel.programs.precompile import ANSWER

OURS, ASKER, GROUP = "02:00:00:00:00:09", "02:00:00:00:00:01", "33:33:ff:00:02:00"
PROBED, PAST = "240.0.0.1", "240.0.0.2"
V4, V6, CLIENT, CLIENT6 = "192.0.2.200", "2001:db8::200", "192.0.2.1", "fe80::1"
BROADCAST = "ff:ff:ff:ff:ff:ff"
LOOPBACK_MAC = "00:00:00:00:00:00"
LOOPBACK = 1  # the device of a run without another

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="bpf(2) is root's")


class Program:
    def __init__(self, fd: int) -> None:
        self.fd = fd

    def run(self, frame: Packet) -> Ran:
        return loader.run_program(self.fd, bytes(frame))

    def leaves(self, frame: Packet) -> bool:
        """Whether the frame goes on, unchanged."""
        done = self.run(frame)
        return done.retval == PASS and done.packet == bytes(frame)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    cache: Path = tmp_path_factory.mktemp("cache")
    answered = bpf_map.open_map(ANSWERED, state_dir.create_map(ANSWERED))
    answered.write([(ip_address(it), Given(LOOPBACK, OURS)) for it in (V4, V6)])
    answered.write([(ip_address("192.0.2.201"), Given(LOOPBACK + 1, OURS))])
    answered.write([(ip_address(PAST), Given(LOOPBACK, OURS, 1))])
    later = time.monotonic_ns() + 3600 * 10**9
    answered.write([(ip_address(PROBED), Given(LOOPBACK, OURS, later))])
    (loaded,) = loader.load(compiler.compile_source(ANSWER, cache=cache), {"answered": answered})
    yield Program(loaded.fd)
    loader.close([loaded])
    answered.close()


def question(target: str = V4, **fields: Any) -> Packet:
    made: dict[str, Any] = {
        "op": "who-has",
        "hwsrc": ASKER,
        "psrc": CLIENT,
        "pdst": target,
        **fields,
    }
    return Ether(src=ASKER, dst=BROADCAST) / ARP(**made)


def solicitation(target: str = V6, source: str = CLIENT6, hops: int = 255) -> Packet:
    to = IPv6(src=source, dst="ff02::1:ff00:200", hlim=hops)
    option = ICMPv6NDOptSrcLLAddr(lladdr=ASKER)
    return Ether(src=ASKER, dst=GROUP) / to / ICMPv6ND_NS(tgt=target) / option


@pytest.mark.parametrize("sender", [CLIENT, "0.0.0.0"])
def test_an_arp_request_is_answered(program: Program, sender: str) -> None:
    """Also a probe, by which others see that the address is taken."""
    done = program.run(question(psrc=sender))
    answer = Ether(done.packet)
    assert done.retval == REDIRECT
    assert (answer.src, answer.dst) == (OURS, ASKER)
    arp = answer[ARP]
    assert (arp.op, arp.hwsrc, arp.psrc, arp.hwdst, arp.pdst) == (2, OURS, V4, ASKER, sender)


def test_a_node_whose_agent_runs_is_heard(program: Program) -> None:
    """By a question to it alone, too."""
    for frame in (question(PROBED), Ether(src=ASKER, dst=LOOPBACK_MAC) / question(PROBED)[ARP]):
        assert Ether(program.run(frame).packet)[ARP].psrc == PROBED


def test_a_solicitation_is_answered(program: Program) -> None:
    """With the flags solicited and override, our MAC address, and a right checksum."""
    done = program.run(solicitation())
    answer = Ether(done.packet)
    assert done.retval == REDIRECT
    assert (answer.src, answer.dst) == (OURS, ASKER)
    assert (answer[IPv6].src, answer[IPv6].dst, answer[IPv6].hlim) == (V6, CLIENT6, 255)
    said = answer[ICMPv6ND_NA]
    assert (said.tgt, said.S, said.O, said.R) == (V6, 1, 1, 0)
    assert said[ICMPv6NDOptDstLLAddr].lladdr == OURS
    sent, computed = said.cksum, answer.copy()
    del computed[ICMPv6ND_NA].cksum
    assert Ether(bytes(computed))[ICMPv6ND_NA].cksum == sent
    assert len(done.packet) == 14 + 40 + 32


def test_a_solicitation_without_option_grows(program: Program) -> None:
    """A unicast one, by which a cache is confirmed, has none."""
    to = IPv6(src=CLIENT6, dst=V6, hlim=255)
    done = program.run(Ether(src=ASKER, dst=LOOPBACK_MAC) / to / ICMPv6ND_NS(tgt=V6))
    assert done.retval == REDIRECT and len(done.packet) == 14 + 40 + 32


@pytest.mark.parametrize(
    "frame",
    [
        question("192.0.2.199"),
        Ether(src=ASKER, dst="02:00:00:00:00:77") / question()[ARP],  # a switch has flooded it
        question("192.0.2.201"),  # answered for at another device
        question(PAST),  # by which a node was probed whose agent has not run since
        question(op="is-at"),
        question(V4, psrc=V4),  # another station's announcement
        question(hwtype=6),
        question(ptype=0x86DD),
        question(hwlen=8),
        Ether(src="01:00:5e:00:00:01") / question()[ARP],  # of no single station
        Ether(src=ASKER, dst=BROADCAST, type=0x806) / b"\0\1\x08\0",
        solicitation("2001:db8::201"),
        solicitation(source="::"),  # duplicate address detection
        solicitation(hops=254),  # a router has forwarded it
        Ether(src=ASKER) / IPv6(src=CLIENT6, dst="ff02::1", hlim=255) / ICMPv6ND_NA(tgt=V6),
        Ether(src=ASKER) / IPv6(src=CLIENT6, dst=V6, nh=58, hlim=255) / b"\x87\0",
        Ether(src=ASKER) / IPv6(src=CLIENT6, dst=V6) / UDP(),
        Ether(src=ASKER) / IP(dst=V4) / UDP(),
    ],
    ids=str,
)
def test_everything_else_goes_on_unchanged(program: Program, frame: Packet) -> None:
    assert program.leaves(frame)


@pytest.mark.parametrize("length", range(14, 42))
def test_a_cut_question_goes_on(program: Program, length: int) -> None:
    frame = bytes(question())[:length]
    assert loader.run_program(program.fd, frame).retval == PASS
