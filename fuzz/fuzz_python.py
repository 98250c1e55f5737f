# SPDX-License-Identifier: Apache-2.0
"""Fuzzes one of the parsers in Python, with atheris: fuzz_python.py TARGET [LIBFUZZER'S ARGUMENTS].

What a parser may raise is part of its target; everything else is a finding.
"""

import logging
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import atheris

PARSERS = [
    *(f"ebpflb.{name}" for name in ("cluster", "config", "model", "options", "cli.run_options")),
    *(f"ebpflb.kernel.{name}" for name in ("netlink", "netfilter.conntrack", "node.device_watch")),
]

with atheris.instrument_imports(include=PARSERS):
    import click

    from ebpflb.cli.run import run
    from ebpflb.cluster import decoding, kubeconfig, manifests
    from ebpflb.config import config_file, translation, validation
    from ebpflb.errors import ClusterError, ConfigurationError, InvalidObject
    from ebpflb.kernel import netlink
    from ebpflb.kernel.netfilter import conntrack
    from ebpflb.kernel.node import device_watch
    from ebpflb.kernel.node.device_watch import LINK_HEADER
    from ebpflb.model import services
    from ebpflb.model.events import Kind
    from ebpflb.model.objects import Service

FOLDER = Path(__file__).parents[1] / "build/fuzz/files"
FOLDER.mkdir(parents=True, exist_ok=True)
DEPTH = 3  # of nested netlink attributes


def service(data: bytes) -> None:
    with suppress(InvalidObject):
        found = decoding.decode(Kind.SERVICE, data)
        assert isinstance(found, Service)
        services.parse(found)


def endpoint_slice(data: bytes) -> None:
    with suppress(InvalidObject):
        decoding.read_object(Kind.ENDPOINT_SLICE, data, "fuzz")


def watch(data: bytes) -> None:
    """Parse a line of a watch, and the same bytes as a list in two parts."""
    with suppress(InvalidObject):
        decoding.line(data)
    half = len(data) // 2
    with suppress(ClusterError), patch.object(decoding, "BATCH", 16):
        decoding.read_list([data[:half], data[half:]], lambda _: None)


def config(data: bytes) -> None:
    (FOLDER / "config").write_bytes(data)
    with suppress(ConfigurationError):
        read = config_file.read(FOLDER / "config")
        if not list(validation.check(read)):
            translation.translate(read)


def kubeconfig_file(data: bytes) -> None:
    """Parse without the client's own loader, which would start the credential plugin."""
    with suppress(ClusterError):
        kubeconfig._parse(data, kubeconfig.MemoryFiles())  # noqa: SLF001


def manifest(data: bytes) -> None:
    path = FOLDER / ("it.json" if data[:1] == b"{" else "it.yaml")
    path.write_bytes(data)
    with suppress(ClusterError):
        manifests.read(path)


def options(data: bytes) -> None:
    """Parse the words of a command line, one per line."""
    words = data.decode(errors="replace").split("\n")
    with suppress(click.ClickException, click.exceptions.Exit):
        run.make_context("ebpflb run", words)


def conntrack_entry(data: bytes) -> None:
    """An entry has both tuples, of one family and protocol, and any other attributes."""
    bytes_ = atheris.FuzzedDataProvider(data)
    protocol, size = _bytes(bytes_, 1), 4 if bytes_.ConsumeBool() else 16
    ways = conntrack.ORIGINAL, conntrack.REPLY
    tuples = {way: _tuple(bytes_, protocol, size) for way in ways}
    more = {kind: content for kind, content in _tree(bytes_).items() if kind not in tuples}
    entry = netlink.encode({**tuples, **more})
    with (
        suppress(struct.error),
        patch.object(conntrack, "dump", lambda *_: [(entry, 0, len(entry))]),
        patch.object(conntrack, "count", lambda: 1),
    ):
        list(conntrack.connections(lambda number, *_: number in (6, 17, 132)))


def _tuple(bytes_: atheris.FuzzedDataProvider, protocol: bytes, size: int) -> netlink.Tree:
    """Return a tuple as the kernel writes it, with any addresses and ports."""
    kind = 1 if size == 4 else 3
    ip = {kind: _bytes(bytes_, size), kind + 1: _bytes(bytes_, size)}
    return {1: ip, 2: {1: protocol, 2: _bytes(bytes_, 2), 3: _bytes(bytes_, 2)}}


def _bytes(bytes_: atheris.FuzzedDataProvider, size: int) -> bytes:
    return bytes_.ConsumeBytes(size).ljust(size, b"\0")


def _tree(bytes_: atheris.FuzzedDataProvider, depth: int = DEPTH) -> netlink.Tree:
    """Return attributes whose lengths are right: the kernel sends no others."""
    return {
        bytes_.ConsumeIntInRange(1, 63): _tree(bytes_, depth - 1)
        if depth and bytes_.ConsumeBool()
        else _leaf(bytes_.ConsumeBytes(bytes_.ConsumeIntInRange(0, 20)))
        for _ in range(bytes_.ConsumeIntInRange(0, 4))
    }


def _leaf(content: bytes) -> bytes:
    """Return content that is valid attributes where the reader expects these."""
    return struct.pack("=H", len(content)) + content[2:] if len(content) >= 4 else content


def device(data: bytes) -> None:
    """Return a device of rtnetlink with its name, and one of its addresses."""
    bytes_ = atheris.FuzzedDataProvider(data)
    head, owner = _bytes(bytes_, LINK_HEADER.size), bytes([2 if bytes_.ConsumeBool() else 10])
    address = {**_tree(bytes_), 2: _bytes(bytes_, 4 if owner == b"\2" else 16)}
    link = head + netlink.encode({**_tree(bytes_), 3: bytes_.ConsumeBytes(16)})
    owned = owner + bytes(3) + head[4:8] + netlink.encode(address)
    answers = iter([[link], [owned]])
    with suppress(struct.error), patch.object(netlink, "dump", lambda *_: next(answers)):
        device_watch.DeviceTable().read()


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        service, endpoint_slice, watch, config, kubeconfig_file, manifest, options,
        conntrack_entry, device,
    )
}  # fmt: skip


if __name__ == "__main__":
    logging.disable()
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()
