# SPDX-License-Identifier: Apache-2.0
"""The agent's loop: event -> cluster state -> plan -> apply.

loop          one turn after another, for as long as the agent runs
node_sync     what this machine and its Node are, in the maps and at the devices
service_sync  what the services are, in the maps
parts         of what is written, of which one may fail
reporter      what others may know of it
build         the agent and all that works beside it, put together
"""

from ebpflb.agent.build import assembled
from ebpflb.agent.loop import Agent

__all__ = ["Agent", "assembled"]
