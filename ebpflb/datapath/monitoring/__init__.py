# SPDX-License-Identifier: Apache-2.0
"""Events of the datapath's decisions, while somebody looks.

variant    the monitoring variant of the programs, and its maps
"""
