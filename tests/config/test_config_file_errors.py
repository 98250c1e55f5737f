# SPDX-License-Identifier: Apache-2.0
"""Configuration files with errors are rejected (kube-proxy.md 15)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebpflb.config import config_file
from ebpflb.errors import ConfigurationError
from tests.config.files import write
from tests.kit.hostile_files import NOT_NESTED, lay


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.conf"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"oomScoreAdj": "low"}, "oomScoreAdj: Expected integer, got string"),
    (
        {"iptables": {"syncPeriod": "soon"}},
        'iptables.syncPeriod: "soon" is not a duration such as 30s or 1h30m',
    ),
    (
        {"iptables": {"masqueradeBit": 2**40}},
        "iptables.masqueradeBit: Expected integer <= 2147483647",
    ),
    ({"featureGates": {"a": "yes"}}, "featureGates[...]: Expected boolean, got string"),
    (
        {"nodePortAddresses": ["10.0.0.0/8", 7]},
        "nodePortAddresses[1]: Expected string, got integer",
    ),
    ({"ipvs": []}, "ipvs: Expected object, got array"),
    (
        {"conntrack": {"tcpEstablishedTimeout": 86400}},
        "conntrack.tcpEstablishedTimeout: 86400 is not a duration such as 30s or 1h30m",
    ),
    (
        {"conntrack": {"udpTimeout": True}},
        "conntrack.udpTimeout: True is not a duration such as 30s or 1h30m",
    ),
]


@pytest.mark.parametrize(("values", "said"), WRONG)
def test_wrong_types(file: Path, values: dict[str, Any], said: str) -> None:
    """A value of a wrong type is named by its path, in lists by its index; so is a duration
    without a unit.
    """
    write(file, **values)
    with pytest.raises(ConfigurationError) as refused:
        config_file.read(file)
    assert str(refused.value).splitlines()[1:] == [f"  {file}: {said}"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"---\n",
        b"apiVersion",
        b"- a\n- b\n",
        b"{ this: is: no: yaml",
        b'{"kind": "KubeProxyConfiguration", ',
        b"\x00\x01\x02",
        b"kind: \xff\xfe",
        b"? [a]\n: 1\n",
        b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
        b"a: &x [*x]\n",
        b"a: !!python/object:os.system x\n",
    ],
)
def test_no_configuration(file: Path, text: bytes) -> None:
    """A file that is not a mapping, such as half of a file, is rejected in a line that names it."""
    file.write_bytes(text)
    with pytest.raises(ConfigurationError) as refused:
        config_file.read(file)
    assert all(line.startswith(f"{file}: ") for line in str(refused.value).splitlines())


def test_no_file(file: Path) -> None:
    """A file that is not there is named."""
    with pytest.raises(ConfigurationError, match=f"{file}: No such file"):
        config_file.read(file)


@pytest.mark.parametrize("make", NOT_NESTED.values(), ids=NOT_NESTED)
def test_what_is_no_file(file: Path, make: Callable[[Path], None]) -> None:
    """A device without end, a pipe or terabytes of holes are named, and not read."""
    lay(make, file)
    with pytest.raises(ConfigurationError, match=str(file)):
        config_file.read(file)


@pytest.mark.parametrize(
    ("values", "paths"),
    [
        ({"apiVersion": "kubeproxy.config.k8s.io/v1alpha2"}, ["apiVersion"]),
        ({"kind": "KubeletConfiguration"}, ["kind"]),
        ({"kind": None, "apiVersion": None}, ["apiVersion", "kind"]),
        ({"kind": {}}, ["kind"]),
    ],
)
def test_wrong_kind(file: Path, values: dict[str, Any], paths: list[str]) -> None:
    """Another kind or version is rejected; if both are wrong, both are reported."""
    with pytest.raises(ConfigurationError) as refused:
        config_file.read(write(file, **values))
    lines = str(refused.value).splitlines()
    assert [line.split(": ")[1] for line in lines] == paths
