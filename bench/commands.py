# SPDX-License-Identifier: Apache-2.0
"""The processor time of each command that only looks, beside an agent of the lab.

`python -m bench.commands [PYTHON]` prints a row for each command: user and system time in seconds,
the best of RUNS, warm. The target is TARGET seconds. The first row is a Python of the same
environment that does nothing: its start is in all others. PYTHON is another environment's, such as
an installation's: a checkout's starts slower, by the files that its site-packages name. Needs root.
"""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from ebpflb.cli.output import Output, print_table
from ebpflb.lab import manifests
from ebpflb.lab.agents import LabAgent
from ebpflb.lab.hosts import Lab

RUNS = 10
TARGET = 0.25  # seconds
SERVICES = 40
COMMANDS = (
    "--help",
    "version",
    "services list",
    "services get default/web-1",
    "explain 10.96.0.1:80",
    "flows list",
    "maps dump",
    "history",
    "status",
    "check",
    "doctor --no-canary",
)


def measure(python: str) -> list[dict[str, object]]:
    """Return a row for each command, which says whether the target is met."""
    name = f"ebpflb-bench-{os.getpid()}"
    with Lab(name) as lab, tempfile.TemporaryDirectory() as folder:
        node = lab.node("node", 1)
        agent = LabAgent(lab, node, Path(folder))
        manifests.write(agent.manifests / "services.yaml", _objects())
        agent.start()
        try:
            nothing = _row([*node.enter, python, "-P", "-c", "pass"], "(Python)", agent)
            ebpflb = [*node.enter, python, "-P", "-m", "ebpflb"]
            rows = (_row([*ebpflb, *each.split()], each, agent) for each in COMMANDS)
            return [nothing, *rows]
        finally:
            agent.close()


def _objects() -> list[manifests.Manifest]:
    found: list[manifests.Manifest] = [manifests.node("node", "192.0.2.1", "2001:db8::1")]
    for number in range(1, SERVICES + 1):
        name, ports = f"web-{number}", [{"port": 80}]
        found.append(manifests.service(name, [f"10.96.0.{number}"], ports))
        pods = [
            manifests.endpoint(f"10.244.1.{each}", node="node", target="web")
            for each in (11, 12, 13)
        ]
        found.append(manifests.endpoint_slice(name, "IPv4", pods, [{"port": 8080}]))
    return found


def _row(command: list[str], name: str, agent: LabAgent) -> dict[str, object]:
    paths = agent.paths
    there = {"EBPFLB_STATE_DIR": str(paths.state), "EBPFLB_RUN_DIR": str(paths.run)}
    environment = {**os.environ, **there}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # warm: modules are compiled
    best = min(_seconds(command, environment) for _ in range(RUNS))
    return {"command": name, "seconds": round(best, 2), "target": TARGET, "met": best <= TARGET}


def _seconds(command: list[str], environment: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    quiet = subprocess.DEVNULL
    subprocess.run(command, stdout=quiet, stderr=quiet, env=environment, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    print_table(measure(*sys.argv[1:] or [sys.executable]), Output())
