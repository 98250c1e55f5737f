# SPDX-License-Identifier: Apache-2.0
"""The report: one archive with what somebody else needs to understand this node.

Most files are the output of a command, each run in its own process with limits of time and size.
The report's README names the commands that hang or fail; all others are included.
"""

import io
import json
import os
import platform
import re
import socket
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from importlib import metadata
from ipaddress import ip_address
from itertools import islice
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryFile
from threading import Timer
from typing import IO, NamedTuple

from ebpflb import child, redaction
from ebpflb.entries.services import protocol_name
from ebpflb.errors import NodeError, in_words, one_line
from ebpflb.kernel.netfilter import firewall
from ebpflb.kernel.netfilter.table import TABLE
from ebpflb.kernel.node import device_watch, routes, sysctls
from ebpflb.model.addresses import Address
from ebpflb.options import Paths
from ebpflb.serve import status
from ebpflb.tools import ask, pins
from ebpflb.version import COMMIT, VERSION

MOST_BYTES = 8 << 20  # of one file
MOST_LOG_LINES = 2000
SECONDS = 60.0  # for one command
_FOLDER = "ebpflb-report"
_CUT = "\n[cut here: {} MiB]\n"
_MAPS = (
    "services slots choices node_addresses own_addresses cluster_ips devices settings verdicts "
    "service_names backend_names translations"
)
_SYSCTLS = (
    *("net/ipv4/ip_forward", "net/ipv4/ip_local_*", "net/ipv4/conf/*/forwarding"),
    *("net/ipv4/conf/*/rp_filter", "net/ipv4/conf/*/route_localnet", "net/ipv4/conf/*/arp_*"),
    *("net/ipv6/conf/*/forwarding", "net/ipv6/conf/*/disable_ipv6", "net/netfilter/*"),
    *("net/bridge/*", "net/core/bpf_jit_*", "net/core/netdev_max_backlog", "kernel/*bpf*"),
)
_MODULES = ("nf_", "nft_", "xt_", "ip_", "ip6", "br_", "bridge", "sch_", "cls_", "act_", "veth")


class Source(NamedTuple):
    """What the report reads: the node's directories, the Services to explain, and an open log."""

    paths: Paths
    services: tuple[str, ...] = ()
    log: IO[bytes] | None = None


class Row(NamedTuple):
    """A file of the report.

    ``origin`` is a function, the words of a command, or the path of a page of the agent.
    """

    file: str
    what: str
    origin: Callable[[Source], str] | str

    def read(self, source: Source) -> str:
        """Return the text. Raises any error if it cannot be read."""
        if not isinstance(self.origin, str):
            return self.origin(source)
        if self.origin.startswith("/"):
            return _page(source.paths, self.origin)
        return _ebpflb(source.paths, *self.origin.split())


def collect(source: Source, key: bytes | None) -> tuple[bytes, list[str]]:
    """Return the archive, and the files that could not be read.

    With ``key`` names and addresses are replaced.
    """
    texts: dict[str, str] = {}
    failed: dict[str, str] = {}
    for row in ROWS:
        try:
            text = row.read(source)
        except Exception as error:  # also a bug: the other files are still written
            failed[row.file] = text = f"not read: {in_words(error)}"
        texts[row.file] = text if len(text) <= MOST_BYTES else _shortened(text)
    _remember_secrets(texts)
    texts["README.md"] = "\n".join(_readme(failed, is_renamed=key is not None))
    texts = {name: redaction.without_secrets(text) for name, text in texts.items()}
    if key is not None:
        names = {name for text in texts.values() for name in names_in(text)}
        pseudonyms = Pseudonyms(key, names | {socket.gethostname()})
        texts = {name: pseudonyms.replace(text) for name, text in texts.items()}
    return _archive(texts), [*failed]


def _shortened(text: str) -> str:
    return text[:MOST_BYTES] + _CUT.format(MOST_BYTES >> 20)


def _remember_secrets(texts: dict[str, str]) -> None:
    """Remember the pod's token and the kubeconfig's secrets, so that they are redacted."""
    from ebpflb.cluster.access import SERVICE_ACCOUNT

    try:
        client = json.loads(texts["configuration.json"])["kubeproxy.config.k8s.io"]
        kubeconfig = client["clientConnection"]["kubeconfig"]
    except (ValueError, KeyError):  # no agent has answered
        kubeconfig = ""
    for path in filter(None, (str(SERVICE_ACCOUNT / "token"), kubeconfig)):
        try:
            text = Path(path).read_text(errors="replace")
        except OSError:
            continue
        redaction.remember_fields(text)
        if path != kubeconfig:
            redaction.remember(text)


def _readme(failed: dict[str, str], *, is_renamed: bool) -> Iterator[str]:
    yield f"# Report of a node by ebpflb {VERSION}\n\nMade at {time.strftime('%FT%T%z')}.\n"
    yield "Secrets and the values of annotations are replaced by `***`."
    if is_renamed:
        yield (
            "Names of namespaces, Services, nodes and pods are `name-...`, and addresses are others"
            " with the same prefixes in common. Names of ports, zones and devices are unchanged."
        )
    else:
        yield "Names and addresses of the cluster are in it: `--no-names` replaces them."
    yield "\n| file | what it is | read? |\n|---|---|---|"
    for row in ROWS:
        yield f"| {row.file} | {row.what} | {one_line(failed.get(row.file, 'read'))} |"
    yield f"\nA file has at most {MOST_BYTES >> 20} MiB; a longer one ends with `[cut here`.\n"


def _archive(texts: dict[str, str]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, text in texts.items():
            data = text.encode(errors="replace")
            entry = tarfile.TarInfo(f"{_FOLDER}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))
    return made.getvalue()


# How the files are read. Each function raises an error if it cannot.


def _ebpflb(paths: Paths, *words: str) -> str:
    """Return the output of a command about the same directories."""
    given = {name: value for name, value in os.environ.items() if name.startswith("EBPFLB_")}
    given |= {"EBPFLB_STATE_DIR": str(paths.state), "EBPFLB_RUN_DIR": str(paths.run)}
    return _output([sys.executable, "-P", "-m", "ebpflb", *words], given)


def _output(command: list[str], variables: dict[str, str] | None = None) -> str:
    """Return a program's output, up to the limit. Raises NodeError with its message."""
    environment = {**child.environment(), **(variables or {})}
    with (
        TemporaryFile() as errors,
        Popen(command, stdout=PIPE, stderr=errors, cwd="/", env=environment) as process,
    ):
        assert process.stdout
        timer = Timer(SECONDS, process.kill)
        timer.daemon = True
        try:
            timer.start()
            data = process.stdout.read(MOST_BYTES + 1)
            if len(data) <= MOST_BYTES:
                process.wait()
        finally:
            is_late = timer.finished.is_set()
            timer.cancel()
            process.kill()
        errors.seek(0)
        said = one_line(errors.read(MOST_BYTES).decode(errors="replace"))
    if is_late:
        raise NodeError(f"it did not end within {SECONDS:g} s")
    if not data:
        raise NodeError(said or f"no output, exit status {process.returncode}")
    return data.decode(errors="replace")


def _page(paths: Paths, path: str) -> str:
    """Return a page of the running agent."""
    code, body = ask.exchange(paths, path, ask.SECONDS)
    if code != 200:
        raise NodeError(f"the agent answered {code}")
    return body.decode(errors="replace")


def _explained(source: Source) -> str:
    """Return the output of `explain` for some Services, with a client on the node and one
    outside.
    """
    named = source.services or tuple(islice(_ports(source.paths), 10))
    parts = []
    for name in named:
        for client in ("node", "outside"):
            try:
                said = _ebpflb(source.paths, "explain", name, "--from", client)
            except NodeError as error:
                said = f"not read: {error}\n"
            parts.append(f"$ ebpflb explain {name} --from {client}\n{said}")
    return "\n".join(parts) or "no Services\n"


def _ports(paths: Paths) -> list[str]:
    """Return the Service ports in the maps, as `explain` takes them."""
    with pins.pinned_maps(paths.state) as maps:
        names = [name for _, name in maps["service_names"].items()]
    return sorted(
        {
            f"{it.owner}{':' * bool(it.port)}{it.port}/{protocol_name(it.protocol).lower()}"
            for it in names
        }
    )


def _nft(_: Source) -> str:
    """Return the table without the elements of its sets, which are dumped as map `translations`."""
    return firewall.run(["nft", "-t", "list", "table", TABLE.family, TABLE.table])


def _log(source: Source) -> str:
    """Return the last lines of the given log, or else of the agent's stderr or its journal."""
    if source.log:
        return _last_lines(source.log.read(MOST_BYTES))
    published = status.read(source.paths)
    stderr = Path(f"/proc/{published.pid if published else 0}/fd/2")
    if stderr.is_file():
        with stderr.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_BYTES))
            return _last_lines(file.read(MOST_BYTES))
    try:
        return _output(["journalctl", "-q", "-u", "ebpflb", "-n", str(MOST_LOG_LINES)])
    except FileNotFoundError:
        raise NodeError(
            "a container cannot read its own log: use `kubectl logs ... | ebpflb report --log -`"
        ) from None


def _last_lines(data: bytes) -> str:
    return "\n".join(data.decode(errors="replace").splitlines()[-MOST_LOG_LINES:]) + "\n"


def _sysctls(_: Source) -> str:
    lines = []
    root = sysctls.OWN_PROC_SYS
    for name in (str(path.relative_to(root)) for each in _SYSCTLS for path in root.glob(each)):
        try:
            lines.append(f"{name} = {sysctls.sysctl_path(name).read_text().strip()}")
        except OSError as error:
            lines.append(f"{name}: {error.strerror}")
    return "\n".join(lines) + "\n"


def _versions(_: Source) -> str:
    packages = sorted(f"{it.name} {it.version}" for it in metadata.distributions())
    return "\n".join([f"ebpflb {VERSION} {COMMIT}", f"python {sys.version}", *packages, ""])


def _kernel(_: Source) -> str:
    """Return release, distribution, modules of networking, and the mounts of bpf and cgroups."""
    modules = [line for line in _lines("/proc/modules") if line.startswith(_MODULES)]
    mounts = [it for it in _lines("/proc/self/mountinfo") if " - bpf " in it or " - cgroup" in it]
    parts = [" ".join(platform.uname())], _lines("/etc/os-release"), modules, mounts
    return "\n".join(line for part in parts for line in (*part, ""))


def _lines(path: str) -> list[str]:
    """Return a file's lines; none if the kernel or the image does not have the file."""
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _devices(_: Source) -> str:
    lines = [str(device) for device in device_watch.list_devices().devices]
    return "\n".join([*lines, "", f"routers: {', '.join(map(str, routes.routers()))}", ""])


# fmt: off
ROWS = (
    Row("status.json", "`status`: verdict, reasons, counts of flows", "status -o json"),
    Row("check.json", "`check`: what this node lacks", "check -o json"),
    Row("doctor.json", "`doctor`, without connections of its own", "doctor --no-canary -o json"),
    Row("services.json", "`services list`, by the agent", "services list -o json"),
    Row("explain.txt", "`explain` of some Services, by name", _explained),
    Row("map-counts.txt", "how many entries each map has, flows among them", "maps dump"),
    Row("maps.json", "maps that the agent writes; also the elements of the nft table, in "
        "`translations`", f"maps dump {_MAPS} -o json"),
    Row("nft.txt", "the nft table without its elements", _nft),
    Row("history.json", "`history`: the last 1,000 changes", "history --limit 1000 -o json"),
    Row("log.txt", f"the last {MOST_LOG_LINES:,} lines of the log", _log),
    Row("metrics.txt", "the agent's metrics", "/metrics"),
    Row("configuration.json", "the configuration that the agent uses", "/configz"),
    Row("flags.txt", "the command-line flags that the agent uses", "/flagz"),
    Row("stacks.txt", "where each thread of the agent is", "/debug/stacks"),
    Row("sysctls.txt", "sysctls of forwarding, conntrack, bridges and BPF", _sysctls),
    Row("devices.txt", "network devices with their addresses, and routers", _devices),
    Row("versions.txt", "versions of ebpflb, Python and its packages", _versions),
    Row("kernel.txt", "kernel, distribution, modules, mounts of bpf and cgroups", _kernel),
)
# fmt: on


# Replaces a cluster's names and addresses with pseudonyms, the same ones in every text.

# Every cluster has these; and the words that `explain` has for clients.
_KEPT = {"default", "kube-system", "kubernetes", "kube-dns", "node", "outside", "address", "ebpflb"}
_FIELDS = re.compile(r'"(?:namespace|name|pod|node|target|source_node)": "([^"\\\n]+)"')
_NODE = re.compile(r"\bNode ([a-z0-9][a-z0-9.-]*)")
_OBJECT = re.compile(
    r'(?:\b(?:Service|EndpointSlice|Pod) |"service": ")([a-z0-9][a-z0-9.-]*)/([a-z0-9][a-z0-9.-]*)'
)
_TOKEN = re.compile(
    r"""(?x) (?P<address> (?<![\w.:]) (?:
            \d{1,3}(?:\.\d{1,3}){3}
          | [0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?:\.\d{1,3}){0,3} ) (?![\w]))
      | (?P<pair> (?<![\w./-]) [a-z0-9][a-z0-9.-]*/[a-z0-9][a-z0-9.-]*
            (?= /(?:TCP|UDP|SCTP)\b | (?![\w/]) ))
      | (?P<word> [A-Za-z0-9][\w.-]*)"""
)
_MAC_COLONS = 5
_LONGEST = 253  # characters of a name in Kubernetes


class Pseudonyms:
    """With the same key the same names get the same pseudonyms, in the reports of all nodes.

    Addresses keep their common prefixes: a subnet stays a subnet.
    """

    def __init__(self, key: bytes, names: set[str]) -> None:
        """``names`` are replaced everywhere, and so is all text of the form A/B."""
        self._key, self._names = key[:64], names - _KEPT
        self._address = cache(self._address)  # type: ignore[method-assign]

    def replace(self, text: str) -> str:
        """Return the text with pseudonyms. Keys of JSON stay, unless they have the form A/B."""
        return _TOKEN.sub(self._token, text)

    def _token(self, found: re.Match[str]) -> str:
        text = found[0]
        if found["address"]:
            return self._place(text)
        if found["pair"]:
            first, _, second = text.partition("/")
            return text if first.isdigit() else f"{self._name(first)}/{self._name(second)}"
        is_key = found.string[found.start() - 1 : found.start()] == '"' and (
            found.string[found.end() : found.end() + 2] == '":'
        )
        return text if is_key else self._word(text)

    def _word(self, text: str) -> str:
        """Replace a known name, a name that begins with it (a pod's), or parts of a DNS name."""
        if len(text) > _LONGEST:
            return text
        begins = text.split("-")
        if any("-".join(begins[:count]) in self._names for count in range(len(begins), 0, -1)):
            return self._name(text)
        parts = text.split(".")
        return ".".join(self._name(each) if each in self._names else each for each in parts)

    def _name(self, text: str) -> str:
        return text if text in _KEPT else f"name-{self._hash(text, 5).hex()}"

    def _place(self, text: str) -> str:
        with suppress(ValueError):
            return str(self._address(ip_address(text)))
        if text.count(":") == _MAC_COLONS and "::" not in text:
            return ":".join(["02", *(f"{it:02x}" for it in self._hash(text.lower(), 5))])
        return text

    def _address(self, address: Address) -> Address:
        """Flip each bit or not, by a hash of the bits before it."""
        if address.is_loopback or address.is_unspecified or address.is_multicast:
            return address
        value, length, made = int(address), address.max_prefixlen, 0
        for left in range(length - 1, -1, -1):
            flip = self._hash(f"{length} {left} {value >> (left + 1)}", 1)[0] & 1
            made = made << 1 | (value >> left & 1) ^ flip
        return type(address)(made)

    def _hash(self, text: str, size: int) -> bytes:
        return blake2b(text.encode(), key=self._key, digest_size=size).digest()


def names_in(text: str) -> Iterator[str]:
    """Yield the names of namespaces, Services, nodes and pods in a command's output."""
    for name in _FIELDS.findall(text):
        yield from name.split("/")
    yield from _NODE.findall(text)
    for pair in _OBJECT.findall(text):
        yield from pair
