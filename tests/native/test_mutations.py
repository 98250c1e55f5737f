# SPDX-License-Identifier: Apache-2.0
"""Mistakes in bpf/rules are found by the tests of sockets or of packets.

Each mutation changes one place of a rule's text in a copy of the checkout, where the tests of one
layer run until the first one fails.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
COPIED = ("bpf", "ebpflb", "tests", "bench", "vagrant", "setup.cfg", "pyproject.toml")
SOCKETS, PACKETS = "tests/native", "tests/packet"
# Of sockets one variant of the hooks, of packets few sets of parameters.
PARTS = {
    SOCKETS: ("-k", "not no_retval"),
    PACKETS: (
        *("-p", "vagrant.kernels.parameter_sets", "--parameter-sets=2"),
        "--parameter-sets=100:tests/packet/test_policies.py",
    ),
}
LOADS = {SOCKETS: "1", PACKETS: "0.2"}
# Files of tests that look first, because each is about the rules of a header; then all others.
FIRST = {
    "affinity": ("affinity",),
    "backend": ("races", "recycled", "recent_choices", "datagrams", "affinity"),
    "frontend": ("frontends", "lookups", "recycled", "refusal", "model", "vips", "devices"),
    "policy": ("policies", "refusal", "marks", "unserved", "devices"),
    "route": ("route_sources", "errors"),
    "scheduler": ("schedulers", "choice", "draw", "least_connections", "choices"),
    "selected": ("refusal", "external_failover", "races", "unserved"),
}


class Mutation(NamedTuple):
    """A change of the header ``file`` of bpf/rules: ``old``, which occurs once, becomes ``new``."""

    layer: str
    file: str
    old: str
    new: str


# By header; each is noticed by the tests of sockets, or of packets.
OF_SOCKETS = {
    "affinity": [
        (".netns = request->netns, ", ""),
        (", .service = service->id };\n\n\tif", " };\n\n\tif"),
        ("if (now > entry", "if (now >= entry"),
        (
            "now > entry->last_used + service->affinity_seconds * SECOND",
            "now - entry->last_used > service->affinity_seconds * SECOND",
        ),
        (" || !(backend->flags & list)", ""),
        ("\tentry->last_used = now;\n", ""),
        ("if (!service->affinity_seconds)", "if (false)"),
        ("if (!pending)", "if (pending)"),
    ],
    "backend": [
        (" && backend->service == service", ""),
        ("COPY_CHECKED(backend, &slot, found)", "(*backend = *found, true)"),
        (" && backend->id == id", ""),
        ("found->service == service && ", ""),
        (" && found->id == id", ""),
    ],
    "frontend": [
        (" || !netns_is_host(netns)", ""),
        ("LOOKUP(__u32, node_addresses, address) != NULL", "true"),
        ("address_is_loopback(address) && (", "("),
        ("bit % 64", "bit % 32"),
        ("FRONTEND_PLACES + BE16(frontend->port)", "frontend_bit(frontend)"),
        ("frontend->port)) ||\n", "frontend->port)) &&\n"),
        ("(port << 8 | frontend->protocol)", "port"),
        (".address = address_any(&frontend->address),", ""),
        (",\n\t\t\t\t  .protocol = frontend->protocol };", " };"),
        ("COPY_CHECKED(service, frontend, found)", "(*service = *found, true)"),
        ("? FOUND : RECYCLED;", "? FOUND : ABSENT;"),
        ("found == ABSENT && node_serves", "node_serves"),
        ("(address_is_foreign_loopback(&frontend->address, netns))\n", "(false)\n"),
    ],
    "policy": [
        ("(service->flags & SERVICE_LOCAL) &&\n", "true &&\n"),
        ("(service->flags & SERVICE_EXTERNAL) && is_local_client", "is_local_client"),
        ("!(service->flags & SERVICE_RESTRICTED) ||", "true ||"),
        ("source_ranges, &range) != NULL", "source_ranges, &range) == NULL"),
    ],
    "scheduler": [
        (".place = product >> 32", ".place = number % places"),
        (", .rest = product }", ", .rest = 0 }"),
        ("list == BACKEND_LOCAL ? &rotation->local :", "0 ? &rotation->local :"),
        ("first += draw_of(bpf_get_prandom_u32(), size).place", "(void)0"),
        ("*turn && *turn <= size ?", "*turn ?"),
        ("*turn = next + 1", "*turn = next"),
        ("if (flags & SERVICE_BY_CLIENT)", "if (false)"),
        ("number_mix(request->netns)", "1"),
        ("(list == BACKEND_LOCAL ? table->size : 0)", "0"),
        ("if (!service->table.size)", "if (true)"),
        ("draw.rest < choice->below", "draw.rest >= choice->below"),
        (".load = (__s32)load->open", ".load = 0"),
        ("!(service->flags & SERVICE_EVEN)", "1"),
        ("least->weight >= least->load", "least->weight <= least->load"),
        ("open * least->weight", "open"),
        ("number = number_mix(number)", "(void)0"),
        ("range->size <= COMPARED_BACKENDS", "false"),
        ("#define COMPARED_BACKENDS 8", "#define COMPARED_BACKENDS 2"),
        ("(__s64)below >> 63", "7"),
        ("flags & SERVICE_LEAST_CONNECTIONS)\n", "flags & SERVICE_LOCAL)\n"),
    ],
    "selected": [
        ("\tcase NO_ENDPOINT:\n", ""),
        ("return VERDICT_NO_LOCAL_ENDPOINT", "return VERDICT_REFUSED"),
        ("return VERDICT_PASSED_THROUGH", "return VERDICT_PASSED"),
        ("return VERDICT_SOURCE_DENIED", "return VERDICT_PASSED"),
        ("return VERDICT_RECYCLED", "return VERDICT_PASSED"),
    ],
}
OF_PACKETS = {
    "affinity": [
        ("key.address = request->tuple->source", "(void)key"),
        ("if (!from_packet)", "if (from_packet)"),
        ("entry = LOOKUP(struct affinity, new_affinity, key)", "(void)0"),
        ("selection->is_pending = true", "(void)0"),
        (".last_used = opened", ".last_used = 0"),
        ("{ .address = *client, .service", "{ .service"),
    ],
    "frontend": [("SETTING_UNKNOWN_PORTS))", "SETTING_UNKNOWN_PORTS) || 1)")],
    "policy": [
        ("SERVICE_EXTERNAL) && is_local_client", "SERVICE_EXTERNAL) && true"),
        (".service = service->id,", ""),
        ("(service->flags & SERVICE_NODEPORT) != 0", "0"),
        ("return !prefix_has(", "return prefix_has("),
        ("(settings->flags & SETTING_DETECT_LOCAL) &&", "true &&"),
        ("(none_v4 && none_v6) ||", "false ||"),
        ("? none_v4 : none_v6", "? none_v6 : none_v4"),
        ("return MASQUERADE_HAIRPIN", "return MASQUERADE_NONE"),
        ("SETTING_MASQUERADE_ALL)", "SETTING_MASQUERADE_HERE)"),
        ("client) && !selection->is_local", "client) && selection->is_local"),
        ("if (service->flags & SERVICE_LOCAL)", "if (false)"),
        ("if (selection->is_local_client)", "if (false)"),
        ("if (!(selection->backend.flags & BACKEND_HERE))", "if (false)"),
        ("SETTING_MASQUERADE_HERE ?", "SETTING_MASQUERADE_ALL ?"),
        ("prefix_has(&settings->span_v4, address) || ", ""),
        ("if (!address_may_have_use(address))", "if (false)"),
        ("if (LOOKUP(__u32, cluster_ips, address))", "if (false)"),
        ("&range) ? UNALLOCATED", "&range) ? NOT_OURS"),
    ],
    "route": [
        ("result == BPF_FIB_LKUP_RET_NO_NEIGH", "false"),
        ("flags |= FIB_SOURCE |", "flags |="),
        ("if (mark) {", "if (false) {"),
        ("v6 ? device->v6 : device->v4", "v6 ? device->v4 : device->v6"),
        (" && route->ifindex == ctx->ifindex", ""),
    ],
    "scheduler": [
        ("address_mix(&request->tuple->source)", "1"),
        ("flags & SERVICE_BY_TUPLE ? 0 : secret_read()", "secret_read()"),
        ("flags & SERVICE_BY_TUPLE ? 0 : secret_read()", "0"),
        ("least->load * backend->weight)", "least->load)"),
        ("if (!request->tuple)\n\t\tservice->table", "if (true)\n\t\tservice->table"),
        ("SERVICE_ROUND_ROBIN && !request->in_middle", "SERVICE_ROUND_ROBIN"),
    ],
    "selected": [
        ("use == CLUSTER_IP ? NO_SUCH_PORT", "use == CLUSTER_IP ? NO_SERVICE"),
        ("? NOT_ALLOCATED", "? NO_SERVICE"),
        ("\tcase NO_SUCH_PORT:\n", ""),
        ("return VERDICT_UNALLOCATED", "return VERDICT_PASSED"),
    ],
}
MUTATIONS = [
    Mutation(layer, file, *change)
    for layer, mutations in ((SOCKETS, OF_SOCKETS), (PACKETS, OF_PACKETS))
    for file, changes in mutations.items()
    for change in changes
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkout")
    for name in COPIED:
        source, target = ROOT / name, made / name
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    return made


def outcome(checkout: Path, layer: str, header: str = "") -> str:
    """Return the last line that the tests of a layer print: how many failed, or passed."""
    names = (f"{layer}/test_{name}.py" for name in FIRST.get(header, ()))
    tests = [*filter(lambda name: (checkout / name).exists(), names), layer]
    words = [sys.executable, "-m", "pytest", "-qx", "-m", "not extended", *PARTS[layer], *tests]
    environment = os.environ | {"EBPFLB_TEST_LOAD": LOADS[layer], "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        words, cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("layer", [SOCKETS, PACKETS])
def test_the_rules_as_they_are_pass(checkout: Path, layer: str) -> None:
    """Without a mutation the tests pass; otherwise the tests below would show nothing."""
    assert "failed" not in (said := outcome(checkout, layer)) and "error" not in said, said


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda it: f"{it.file}: {it.old.strip()}")
def test_is_noticed(checkout: Path, mutation: Mutation) -> None:
    header = checkout / f"bpf/rules/{mutation.file}.h"
    text = header.read_text()
    assert text.count(mutation.old) == 1
    header.write_text(text.replace(mutation.old, mutation.new))
    try:
        assert " failed" in (said := outcome(checkout, mutation.layer, mutation.file)), said
    finally:
        header.write_text(text)
