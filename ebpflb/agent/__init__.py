# SPDX-License-Identifier: Apache-2.0
"""The corridor between what is said and what is so: event -> picture -> plan -> apply.

``corridor``  one turn after another, for as long as the agent runs
``machine``   what this machine and its Node are, in the maps and at the devices
``services``  what the services are, in the maps
``parts``     of what is written, of which one may fail
``report``    what others may know of it
``assembly``  the agent and all that works beside it, put together
"""

from ebpflb.agent.assembly import assembled
from ebpflb.agent.corridor import Agent

__all__ = ["Agent", "assembled"]
