# SPDX-License-Identifier: Apache-2.0
"""/flagz shows the flags that `ebpflb run` was given (kube-proxy.md 13.2)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebpflb.cli.run import run as command
from ebpflb.config.parameters import PARAMETERS
from ebpflb.serve.listener import Request
from tests.cli.conftest import NEVER
from tests.config.files import write
from tests.serve.conftest import plain_pages

Flagz = Callable[..., dict[str, str]]


@pytest.fixture
def flagz(would_serve: Callable[..., tuple[Any, ...]], tmp_path: Path) -> Flagz:
    """Return the lines of the page of an agent that was started with these arguments."""
    where = ["--manifests", tmp_path, "--state-dir", NEVER, "--run-dir", tmp_path]

    def lines(*words: object) -> dict[str, str]:
        _, _, flags, *_ = would_serve(*where, *words)
        page = plain_pages(flags=flags).respond(Request("/flagz", "")).body.decode()
        _heading, _, said = page.partition("\n\n")
        found = dict(line.split("=", 1) for line in said.splitlines())
        assert list(found) == sorted(found)
        return found

    return lines


def test_every_flag_is_there(flagz: Flagz) -> None:
    """kube-proxy's and ebpflb's own flags are there, given or not, each under its first name."""
    own = {it.opts[0] for it in command.params if it.opts[0] in ("--manifests", "--devices")}
    assert len(own) == 2
    every = {f"--{row.flag}" for row in PARAMETERS if row.flag} | own
    assert every <= {f"--{name}" for name in flagz()}


def test_what_was_given(flagz: Flagz) -> None:
    """/flagz shows the value in force, however it was written."""
    said = flagz(
        *("--masquerade_all", "--guard-nodeports", "-v=2", "--iptables-sync-period=90s"),
        *("--nodeport-addresses=10.0.0.0/8,::/0", "--feature-gates=B=false,A=true"),
        *("--masquerade-ports=40000-40099", "--devices=eth*", "--devices=!eth9", "--vmodule=a=1"),
        *("--external-ips=203.0.113.0/24,2001:db8::/32", "--packet-mark=0x4000/0x4000"),
        "--nodeport-source-ranges=198.51.100.0/24,2001:db8::/32",
        *("--namespaces=shop,default", "--services=app in (a,b),!old"),
        *("--healthz-port=0", "--healthz-bind-address="),
        *("--api-server=192.0.2.1:6443", "--api-server=[2001:db8::1]:6443,http://a.example:80/"),
        "--local-api-server=[::1]:7445",
    )
    servers = "https://192.0.2.1:6443,https://[2001:db8::1]:6443,http://a.example:80"
    assert (said["api-server"], said["local-api-server"]) == (servers, "[::1]:7445")
    assert said["masquerade-all"] == "true"
    assert said["v"] == "2"
    assert said["iptables-sync-period"] == "1m30s"
    assert said["nodeport-addresses"] == "[10.0.0.0/8,::/0]"
    assert said["feature-gates"] == "A=true,B=false"
    assert said["masquerade-ports"] == "40000-40099"
    assert said["external-ips"] == "203.0.113.0/24,2001:db8::/32"
    assert said["packet-mark"] == "0x4000/0x4000"
    assert (said["namespaces"], said["services"]) == ("default,shop", "app in (a,b),!old")
    assert said["nodeport-source-ranges"] == "198.51.100.0/24,2001:db8::/32"
    assert said["devices"] == "[eth*,!eth9]"
    assert said["vmodule"] == "a=1"
    assert (said["healthz-port"], said["healthz-bind-address"]) == ("0", "")


def test_what_the_file_says(flagz: Flagz, tmp_path: Path) -> None:
    """The file's fields replace flags; the fields of the mode in use count."""
    file = tmp_path / "config.conf"
    write(file, mode="nftables", clusterCIDR="10.0.0.0/8", nftables={"masqueradeAll": True})
    said = flagz("--config", file, "--cluster-cidr=11.0.0.0/8")
    assert (said["config"], said["proxy-mode"]) == (str(file), "nftables")
    assert said["cluster-cidr"] == "10.0.0.0/8"
    assert said["masquerade-all"] == "true"
