# SPDX-License-Identifier: Apache-2.0
"""Configuration files: their values, and the defaults for missing ones (kube-proxy.md 15)."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from ebpflb.config import config_file, fields
from ebpflb.config.fields import KubeProxyConfiguration
from ebpflb.model.addresses import Duration
from tests.config.files import HEAD, KUBEADM, write


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.conf"


def test_an_empty_file_gives_the_defaults(file: Path) -> None:
    """An empty file gives kube-proxy's defaults, but no pause between writes."""
    said = fields.to_builtins(config_file.read(write(file)))
    assert said["bindAddress"] == "0.0.0.0"
    assert said["healthzBindAddress"] == "0.0.0.0:10256"
    assert said["metricsBindAddress"] == "127.0.0.1:10249"
    assert said["oomScoreAdj"] == -999
    assert said["configSyncPeriod"] == "15m0s"
    assert said["detectLocalMode"] == "ClusterCIDR"
    assert said["clientConnection"] == {
        "kubeconfig": "",
        "acceptContentTypes": "",
        "contentType": "application/vnd.kubernetes.protobuf",
        "qps": 5,
        "burst": 10,
    }
    assert said["conntrack"] == {
        "maxPerCore": 32768,
        "min": 131072,
        "tcpEstablishedTimeout": "24h0m0s",
        "tcpCloseWaitTimeout": "1h0m0s",
        "tcpBeLiberal": None,
        "udpTimeout": "0s",
        "udpStreamTimeout": "0s",
    }
    for mode in ("iptables", "nftables"):
        assert said[mode]["masqueradeBit"] == 14
        assert (said[mode]["syncPeriod"], said[mode]["minSyncPeriod"]) == ("30s", "0s")
    assert said["ipvs"]["syncPeriod"] == "30s"
    assert said["iptables"]["localhostNodePorts"] is True
    assert said["logging"]["format"] == "text"


def test_a_file_of_kubeadm_gives_no_warning(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """kubeadm's file, full of zeros and nulls that mean defaults, gives no warning."""
    assert config_file.read(KUBEADM) == config_file.read(
        write(
            file,
            clusterCIDR="10.244.0.0/16",
            clientConnection={"kubeconfig": "/var/lib/kube-proxy/kubeconfig.conf"},
            conntrack={"tcpBeLiberal": False},
        )
    )
    assert not caplog.records


def test_unknown_fields_are_logged(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Unknown fields are logged by name; of duplicate fields the last one counts."""
    file.write_text(
        f"{yaml.safe_dump(HEAD)}modes: x\nmode: ipvs\nmode: iptables\n"
        "ipvs: {ipSet: {a: 1}, scheduler: rr, scheduler: sh}\n"
        "logging: {vmodule: [{filePattern: x, verbosity: 1, why: no}], flushFrequency: 0s}\n"
    )
    found = config_file.read(file)
    assert (found.mode, found.ipvs.scheduler) == ("iptables", "sh")
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: unknown fields are ignored: modes, ipvs.ipSet",
        f"{file}: accepted, but ignored: logging.vmodule",
    ]


def changed(value: Any) -> Any:
    """Return another value of the same type, which is not zero."""
    match value:
        case bool() | None:
            return not value
        case Duration():
            return Duration(value + 1_500_000_000)
        case int() | float():
            return value + 1
        case str():
            return f"{value}x"
        case tuple():
            return ("a", "b")
        case dict():
            return {"A": True, "B": False}
    raise AssertionError(value)


def altered(section: Any) -> Any:
    """Return a section in which no field has its default value."""
    return msgspec.structs.replace(
        section,
        **{
            field.name: altered(value) if isinstance(value, fields.Section) else changed(value)
            for field in msgspec.structs.fields(section)
            for value in [getattr(section, field.name)]
            if field.name not in ("api_version", "kind")
        },
    )


def test_round_trip(file: Path) -> None:
    """A written configuration reads back the same in every field."""
    found = altered(KubeProxyConfiguration())
    file.write_text(fields.as_yaml(found))
    assert config_file.read(file) == found
