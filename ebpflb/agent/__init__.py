# SPDX-License-Identifier: Apache-2.0
"""The corridor between what is said and what is so: event -> picture -> plan -> apply.

``corridor``  one turn after another, for as long as the agent runs
``machine``   what this machine and its Node are, in the maps and at the devices
``services``  what the services are, in the maps
"""

from ebpflb.agent.corridor import Agent

__all__ = ["Agent"]
