# SPDX-License-Identifier: Apache-2.0
"""The capabilities that deploy/ grants suffice to serve, and none of them is superfluous."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ebpflb.kernel.netfilter.flowtable import flowtable_obstacle
from ebpflb.kernel.netfilter.probe import leave_answers, left_answers
from ebpflb.kernel.node import namespaces
from ebpflb.lab.agents import LabAgent
from ebpflb.options import Paths
from tests.deploy import helm
from tests.deploy.rights import (
    Confined,
    Rights,
    cluster,
    granted_by_the_unit,
    limited_to,
    mask,
    mask_of,
    moves_connected_datagrams,
    ours,
    packet_path,
    serves,
)
from tests.kernel.node import nodes

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives rights away")

FILTERED = 2  # SECCOMP_MODE_FILTER


def granted_by_the_chart(**rights: bool) -> Rights:
    (objects,) = helm.render({"rights": rights})
    return granted_to(helm.container(objects))


def granted_to(container: helm.Object) -> Rights:
    added = container["securityContext"]["capabilities"]
    assert added["drop"] == ["ALL"]
    return tuple(f"CAP_{name}" for name in added["add"])


def probe_container() -> helm.Object:
    """Return the init container that tries the features that need a new namespace."""
    (objects,) = helm.render({"rights": LEAST})
    spec = helm.the("DaemonSet", objects)["spec"]["template"]["spec"]
    found: list[helm.Object] = spec["initContainers"]
    (only,) = found
    return only


LEAST = {"lockMemory": False, "enterPods": False}


def of_process(agent: LabAgent, line: str) -> int:
    assert agent.process is not None
    return mask_of(Path(f"/proc/{agent.process.pid}/status"), line)


@pytest.mark.parametrize(
    "granted",
    [
        granted_by_the_chart,
        granted_by_the_unit,
        pytest.param(partial(granted_by_the_chart, **LEAST), marks=pytest.mark.extended),
    ],
    ids=["the chart", "the unit", "the chart at the least"],
)
def test_granted_rights_are_enough(granted: Callable[[], Rights], tmp_path: Path) -> None:
    """With the granted rights the agent serves, also after a restart.

    All cases run under the seccomp profile of container runtimes. With the fewest rights the agent
    also compiles. The right to enter namespaces lets it end pods' sockets, and find out whether
    netfilter translates; without that right an init container finds this out.
    """
    rights = granted()
    compiles = set(rights) == set(namespaces.NEEDED_CAPABILITIES)
    with cluster(tmp_path, tmp_path / "cache" if compiles else Paths.cache) as made:
        enters = "CAP_SYS_ADMIN" in rights
        if not enters:
            probe(made, tmp_path)
        made.agent.under = limited_to(rights, tmp_path)
        made.agent.start()
        assert "compiled" in made.agent.log() or not compiles
        assert of_process(made.agent, "CapEff") == mask(rights) & ours()
        assert of_process(made.agent, "Seccomp") == FILTERED
        serves(made)
        made.agent.stop()
        made.agent.start()
        serves(made)
        assert packet_path(made) == "netfilter"
        assert moves_connected_datagrams(made, 60 if enters else 5) == enters
        warnings = [line for line in made.agent.log().splitlines() if " W " in line]
        known = ("CAP_SYS_ADMIN is missing", str(flowtable_obstacle()))
        assert not [line for line in warnings if not any(it in line for it in known)]


def probe(made: Confined, folder: Path) -> None:
    """Run the chart's init container on the node, with its rights, and return its answers."""
    container = probe_container()
    made.agent.under = limited_to(granted_to(container), folder)
    words = [it for it in container["args"] if not it.startswith("--config=")]
    words += [*made.agent.where, "--cgroup-root", str(made.node.cgroup)]
    with made.agent.log_file.open("a") as log:
        assert made.agent.spawn(words, log).wait() == 0, made.agent.log()


@pytest.mark.parametrize("what", ["ebpflb", "kube-proxy"])
def test_cleanup_needs_no_more_rights(what: str, tmp_path: Path) -> None:
    """The chart's cleanup container removes everything under the same seccomp profile."""
    (objects,) = helm.render({"cleanup": what})
    spec = helm.the("DaemonSet", objects)["spec"]["template"]["spec"]
    (container,) = (it for it in spec["initContainers"] if it["name"] == "cleanup")
    ours = what == "ebpflb"
    with cluster(tmp_path, Paths.cache) as made, nodes.entered(made.node.netns):
        if ours:
            made.agent.start()
            made.agent.stop()
        else:
            nodes.run("iptables", "--table", "nat", "--new-chain", "KUBE-SERVICES")
        made.agent.under = limited_to(granted_to(container), tmp_path)
        words = ["cleanup", *made.agent.where, *(() if ours else ("--kube-proxy",))]
        with made.agent.log_file.open("a") as log:
            assert made.agent.spawn(words, log).wait() == 0, made.agent.log()
        assert "KUBE" not in nodes.run("iptables-save", "--table", "nat")
        assert not made.agent.paths.state.exists()
        assert "ebpflb" not in nodes.run("nft", "list", "tables")


def test_answers_of_another_boot_are_not_believed(tmp_path: Path) -> None:
    """Results from before a reboot say nothing about the running kernel."""
    under = limited_to(namespaces.NEEDED_CAPABILITIES, tmp_path)
    asked = "from ebpflb.kernel.netfilter.probe import *; from pathlib import Path; import sys"
    code = f"{asked}; print(left_answers(Path(sys.argv[1])))"
    left = tmp_path / "run/kernel.json"
    leave_answers(left)
    said = [output_of([*under, sys.executable, "-c", code, str(left)])]
    assert left_answers(left) is None  # this process can try itself
    left.write_text(left.read_text().replace('"boot":"', '"boot":"0'))
    said.append(output_of([*under, sys.executable, "-c", code, str(left)]))
    assert (said[0].startswith("Answers("), said[1]) == (True, "None\n")


def test_only_needed_rights_are_granted() -> None:
    """There are three rights for everything, one for old kernels, and one for pods' namespaces."""
    assert granted_by_the_chart(**LEAST) == ("CAP_BPF", "CAP_NET_ADMIN", "CAP_PERFMON")
    assert set(namespaces.NEEDED_CAPABILITIES) == set(granted_by_the_chart(**LEAST))
    more = set(granted_by_the_chart()) - set(namespaces.NEEDED_CAPABILITIES)
    assert more == {"CAP_SYS_RESOURCE", "CAP_SYS_ADMIN"}
    admin = {"CAP_SYS_ADMIN"}
    assert set(granted_to(probe_container())) == {*namespaces.NEEDED_CAPABILITIES, *admin}
    assert set(granted_by_the_unit()) == {*namespaces.NEEDED_CAPABILITIES, "CAP_SYS_ADMIN"}


@pytest.mark.parametrize("lost", namespaces.NEEDED_CAPABILITIES)
def test_each_right_is_needed(lost: str, tmp_path: Path) -> None:
    """Without any one of the three rights nothing starts, and the error names the missing one."""
    rest = tuple(name for name in namespaces.NEEDED_CAPABILITIES if name != lost)
    refused = f"ebpflb: missing capabilities: {lost}: run as root, or grant them\n"
    assert failure(limited_to(rest, tmp_path), "run", "--manifests", str(tmp_path)) == refused


def test_seccomp_is_named(tmp_path: Path) -> None:
    """If an older runtime's profile denies bpf(2) despite CAP_BPF, the error names seccomp, not a
    missing right.
    """
    needed = namespaces.NEEDED_CAPABILITIES
    under = limited_to(needed, tmp_path, profile=("CAP_NET_ADMIN", "CAP_PERFMON"))
    for command in (("run", "--manifests", str(tmp_path)), ("check",)):
        said = failure(under, *command)
        assert "bpf(2)" in said
        assert "refused by the seccomp profile of this container" in said, said


def failure(under: list[str], *command: str) -> str:
    """Run a command of ebpflb that fails, and return its output."""
    done = subprocess.run(
        [*under, sys.executable, "-m", "ebpflb", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 1
    return done.stderr or done.stdout


def output_of(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=240)
    return done.stdout


def test_compiler_keeps_no_right(tmp_path: Path) -> None:
    """The compiler drops its capabilities, even if it may not change its user."""
    giving_up = "from ebpflb.kernel.programs import bcc_child; bcc_child._give_up_rights()"
    command = f"{giving_up}; print(open('/proc/self/status').read(), end='')"
    under = limited_to(namespaces.NEEDED_CAPABILITIES, tmp_path)
    held = tmp_path / "held"
    held.write_text(output_of([*under, sys.executable, "-c", command]))
    assert [mask_of(held, line) for line in ("CapEff", "CapPrm", "CapAmb")] == [0, 0, 0]
    assert mask_of(held, "CapBnd") == mask(namespaces.NEEDED_CAPABILITIES)
