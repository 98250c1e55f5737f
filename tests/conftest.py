# SPDX-License-Identifier: Apache-2.0
"""For all rooms: a machine that is busy fails no property."""

from hypothesis import HealthCheck, settings

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
