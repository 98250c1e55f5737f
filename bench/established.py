# SPDX-License-Identifier: Apache-2.0
"""What a packet of an established flow costs at a device, and one of no flow, by test runs.

    python -m bench.established [--rounds N] [FOLDER]

With FOLDER, a working tree of another commit, the two are measured in turn, so that both meet the
same state of the machine. Each figure is the smallest mean of all rounds, in nanoseconds.
"""

import json
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import click

from ebpflb.datapath.maps import bpf_map, layout, records
from ebpflb.datapath.programs import compiler, loader, testrun
from ebpflb.options import Paths

ROOT = Path(sys.argv[0]).resolve().parent.parent
BATCHES, REPEAT = 7, 300_000  # test runs of one round
CLIENT, BACKEND = "10.0.0.1", "10.0.0.2"
CLIENT_PORT, BACKEND_PORT = 1000, 2000
KINDS = {"ingress": "FLOW_UN_SNAT", "egress": "FLOW_UN_DNAT"}
_ACK = 0x10


def frame(protocol: int, port: int) -> bytes:
    """An Ethernet frame from the client's port, with a segment that only acknowledges, or data."""
    if protocol == socket.IPPROTO_TCP:
        inner = struct.pack("!HHIIBBHHH", port, BACKEND_PORT, 1, 1, 0x50, _ACK, 1000, 0, 0)
    else:
        inner = struct.pack("!HHHH", port, BACKEND_PORT, 28, 0x1234) + bytes(20)
    ends = socket.inet_aton(CLIENT) + socket.inet_aton(BACKEND)
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(inner), 1, 0, 64, protocol, 0)
    return bytes(12) + b"\x08\x00" + header + ends + inner


def entry(protocol: int, hook: str) -> tuple[Any, Any]:
    """A flow whose packets stay as they are, so that one can run through the program again."""
    hooks = layout.ffi.typeof("enum hook").relements
    kinds = layout.ffi.typeof("enum flow_kind").relements
    ends = ip_address(CLIENT), ip_address(BACKEND), CLIENT_PORT, BACKEND_PORT
    address, port, other = (
        (ends[1], BACKEND_PORT, CLIENT_PORT)
        if hook == "ingress"
        else (ends[0], CLIENT_PORT, BACKEND_PORT)
    )
    names = records.Flow._fields
    fields = dict.fromkeys(names, 0) | {"flags": frozenset(), "kind": kinds[KINDS[hook]]}
    fields |= {"address": address, "port": port, "other_port": other}
    return records.Tuple(*ends, protocol, hooks[f"HOOK_{hook.upper()}"]), records.Flow(**fields)


def measured() -> Iterator[tuple[str, int]]:
    """Names of what is measured, and nanoseconds."""
    maps = {
        name: bpf_map.open_map(spec, bpf_map.create_map(spec)) for name, spec in layout.MAPS.items()
    }
    compiled = compiler.compile_source(
        "hooks/packet.c", ("-DHAVE_COARSE_CLOCK",), cache=Paths.cache
    )
    programs = {program.name: program.fd for program in loader.load(compiled, maps)}
    for hook in KINDS:
        for word, protocol in (("TCP", socket.IPPROTO_TCP), ("UDP", socket.IPPROTO_UDP)):
            flows = maps["tcp_flows" if word == "TCP" else "other_flows"]
            flows.write([entry(protocol, hook)])
            for state, port in (("established", CLIENT_PORT), ("no flow", CLIENT_PORT + 1)):
                packet = frame(protocol, port)
                runs = (testrun.run(programs[hook], packet, repeat=REPEAT) for _ in range(BATCHES))
                yield f"{word}, {state}, {hook}", min(run.nanoseconds for run in runs)


def _one_round(folder: Path) -> dict[str, int]:
    """Measures the code of this folder, in a process of its own."""
    code = Path(__file__).read_text()
    done = subprocess.run(
        [sys.executable, "-c", code, "--once"],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.argument("other", required=False, type=click.Path(exists=True, path_type=Path))
def main(rounds: int, other: Path | None) -> None:
    """Measures this working tree, and another one beside it."""
    folders = [folder.resolve() for folder in (other, ROOT) if folder]
    best: list[dict[str, int]] = [{} for _ in folders]
    for _ in range(rounds):
        for folder, known in zip(folders, best, strict=True):
            for name, nanoseconds in _one_round(folder).items():
                known[name] = min(nanoseconds, known.get(name, nanoseconds))
    for name in best[0]:
        click.echo(f"{name:32}" + "".join(f"{known[name]:>8} ns" for known in best))


if __name__ == "__main__":
    if sys.argv[1:] == ["--once"]:
        print(json.dumps(dict(measured())))
    else:
        main()
