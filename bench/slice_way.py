# SPDX-License-Identifier: Apache-2.0
"""Through which files of ebpflb/ one changed EndpointSlice goes, from the API server to the maps.

    sudo .venv/bin/python -m bench.slice_way

An agent beside a fake API server, with ten Services; an EndpointSlice gets another endpoint, and a
client waits for its first answer. Each thread's files are printed in the order of their first call,
then how many files those are, and how often the way changes from one to another: the shortest way
of five, because what the agent does once a second, as its status, may fall into one.
"""

import json
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO

from bench import traced_agent
from bench.api_lab import ApiNode, serve_pods
from bench.connect_lab import Client
from bench.temporary_lab import temporary_lab
from ebpflb.lab.agents import LabAgent, wait_until
from ebpflb.lab.hosts import Lab, Process, start

PREFIX = "ebpflb-way"
SIZES = [[10, 1]]  # ten services of an endpoint
TIMES = 5

Visits = dict[str, list[str]]  # files by thread


def main() -> None:
    """Print the way."""
    visits = min((measured() for _ in range(TIMES)), key=_files_of)
    for thread, files in sorted(visits.items()):
        print(f"{thread}: {', '.join(dict.fromkeys(files))}")
    changes = sum(len(files) - 1 for files in visits.values())
    print(f"{_files_of(visits)} files, {changes} changes of file")


def _files_of(visits: Visits) -> int:
    return len(set().union(*visits.values()))


def measured(prefix: str = PREFIX) -> Visits:
    """Return the files that each thread runs in, in their order."""
    with temporary_lab(prefix) as (lab, folder, stack):
        return _measured(lab, folder, stack)


def _measured(lab: Lab, folder: Path, stack: ExitStack) -> Visits:
    node = lab.node("node", 1)
    client = Client(lab, lab.pod(node, "client", 2))
    api = ApiNode(lab, node, folder, stack, serve_pods(lab, node), SIZES)
    api.listen()
    agent, file = api.agent.agent, folder / "visits"
    agent.spawn = partial(_spawn, agent, file)  # type: ignore[method-assign]
    api.agent.start()
    api.wait_for_quiet()
    api.move(client, 1)  # what the first change imports and fills
    api.wait_for_quiet()
    assert agent.process
    agent.process.send_signal(traced_agent.BEGIN)
    wait_until("the agent records its visits", file.with_suffix(".begun").exists)
    api.move(client, 0)
    agent.process.send_signal(traced_agent.END)
    wait_until("the agent has written its visits", file.exists)
    visits: Visits = json.loads(file.read_text())
    return visits


def _spawn(agent: LabAgent, file: Path, words: list[str], log: IO[str]) -> Process:
    command = [sys.executable, "-P", traced_agent.__file__, str(file), *words]
    return start(agent.node.netns, agent.lab.cgroup, command, stdout=log, stderr=log)


if __name__ == "__main__":
    main()
