# SPDX-License-Identifier: Apache-2.0
"""The entries of the maps, as values: below the kernel, which reads and writes them, and the plan.

services         entries that the plan writes: frontends, services, slots, names, ranges
flows            which entries of the packet path form one flow, and the state of the flow
"""
