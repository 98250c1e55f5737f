# SPDX-License-Identifier: Apache-2.0
"""A first start that fails undoes its changes of the node, as far as possible."""

from pathlib import Path

import pytest

from ebpflb.agent.node_sync import host_changes
from ebpflb.kernel.netfilter import nft
from ebpflb.kernel.netfilter import table as netfilter_table
from ebpflb.kernel.node import sysctls
from ebpflb.options import Options, Paths


def test_each_change_is_undone_whatever_the_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A setting that cannot be restored does not keep the other settings and the ports from being
    restored.
    """
    undone = list[object]()

    def restore(path: Path, former: str) -> None:
        if path.name == "read-only":
            raise OSError(30, "Read-only file system", str(path))
        undone.append(path.name)

    def set_up(_: object, former: dict[Path, str]) -> None:
        former |= {Path("/one"): "1", Path("/read-only"): "2", Path("/two"): "3"}

    monkeypatch.setattr(sysctls, "restore_conntrack", restore)
    monkeypatch.setattr(sysctls, "set_up_conntrack", set_up)
    monkeypatch.setattr(sysctls, "reserve_ports", lambda *_: None)
    monkeypatch.setattr(sysctls, "release_ports", lambda record: undone.append("ports"))
    monkeypatch.setattr(nft, "exists", lambda table: False)
    monkeypatch.setattr(netfilter_table, "remove", lambda: undone.append("table"))
    options = Options(Paths(tmp_path / "state", tmp_path), "node-1", tmp_path)
    with pytest.raises(ValueError, match="cannot serve"), host_changes(options) as host:
        host.make()
        raise ValueError("cannot serve")
    assert undone == ["two", "one", "ports", "table"]
    (said,) = caplog.messages
    assert said == "the node's settings have changed: /read-only: Read-only file system"
