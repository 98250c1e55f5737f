# SPDX-License-Identifier: Apache-2.0
"""State directories, cgroups and maps: those of the datapath's own tests."""

from tests.datapath.conftest import all_maps as all_maps
from tests.datapath.conftest import cgroup as cgroup
from tests.datapath.conftest import cgroups as cgroups
from tests.datapath.conftest import directory as directory
from tests.datapath.conftest import home as home
from tests.datapath.conftest import inside as inside
