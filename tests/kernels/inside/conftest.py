# SPDX-License-Identifier: Apache-2.0
"""State directories, cgroups and maps from the datapath's own tests."""

from tests.kernel.conftest import all_maps as all_maps
from tests.kernel.conftest import cgroup as cgroup
from tests.kernel.conftest import cgroups as cgroups
from tests.kernel.conftest import directory as directory
from tests.kernel.conftest import home as home
from tests.kernel.conftest import inside as inside
