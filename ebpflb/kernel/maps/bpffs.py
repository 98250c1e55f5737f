# SPDX-License-Identifier: Apache-2.0
"""The bpffs that holds state directories: where it is mounted, and why one is not seen."""

from pathlib import Path

from ebpflb import child
from ebpflb.errors import NodeError

BPFFS = Path("/sys/fs/bpf")
_MOUNT = f"mount -t bpf bpf {BPFFS}"
_NAMED = 4  # state directories named in one line


def mount_of(path: Path) -> tuple[Path, str]:
    """Return the mount point of ``path``, which need not exist, and its type.

    The last mount counts.
    """
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    holding = [(m, kind) for m, kind in mounts if path == Path(m) or Path(m) in path.parents]
    mount, kind = max(reversed(holding), key=lambda found: len(found[0]))
    return Path(mount), kind


def why_unseen(path: Path) -> str:
    """Return why there is no such state directory, and what to do; "" if there is one."""
    mount, kind = mount_of(path.resolve())
    if path.is_dir() and kind == "bpf":
        return ""
    if hidden := why_hidden(path):
        return hidden
    if kind != "bpf":
        is_mounted = mount_of(BPFFS) == (BPFFS, "bpf")
        help = f"give a --state-dir below {BPFFS}" if is_mounted else f"mount one ({_MOUNT})"
        return (
            f"{path} is not in a bpffs here ({mount} is of type {kind}): {help}, or in a cluster "
            "use `kubectl exec` into ebpflb's pod"
        )
    if others := state_directories(mount):
        named = " or ".join(map(str, others[:_NAMED])) + (" or ..." if others[_NAMED:] else "")
        return f"there is no state directory {path}: give --state-dir {named}"
    return f"there is no state directory {path}: did `ebpflb run` start, with this --state-dir?"


def why_hidden(path: Path) -> str:
    """Return what to do if `ip netns exec` hides the bpffs; "" if it does not.

    `ip netns exec` mounts a sysfs over the machine's, and names it after the network namespace.
    """
    if mount_of(path) != (Path("/sys"), "sysfs"):
        return ""
    lines = map(str.split, Path("/proc/self/mounts").read_text().splitlines())
    name = [line[0] for line in lines if line[1] == "/sys"][-1]
    if not Path("/run/netns", name).exists():
        return ""
    helps = f"run `nsenter --net=/run/netns/{name} ebpflb ...` instead"
    return f"`ip netns exec` hides {path}: {helps}"


def state_directories(mount: Path) -> list[Path]:
    """Return the state directories of agents in this bpffs, at its root or one directory below."""
    return sorted(it.parent for depth in ("*", "*/*") for it in mount.glob(f"{depth}/links"))


def mount_bpffs(path: Path) -> None:
    """Mount a bpffs at its usual place if ``path`` is there and none is mounted yet.

    Raises NodeError if ``path`` is not in a bpffs, or mounting fails. It also refuses to mount in a
    container on the host's directory: only the container would see that mount, and the mount would
    be lost with the container.
    """
    mount, kind = mount_of(path)
    if kind == "bpf":
        return
    if mount == BPFFS:
        raise NodeError(f"{BPFFS} is the host's, and not a bpffs: mount one there, on the host")
    if BPFFS not in (path, *path.parents):
        hint = f"mount one there (mount -t bpf bpf DIR), or choose a --state-dir below {BPFFS}"
        raise NodeError(f"{path} is not in a bpffs: {hint}")
    try:
        done = child.run(["mount", "-t", "bpf", "bpf", str(BPFFS)])
    except OSError as error:
        raise NodeError(f"no bpffs at {BPFFS}, and no mount(8): {error.strerror}") from error
    if done.returncode:
        raise NodeError(f"no bpffs at {BPFFS}, and mounting one failed: {done.stderr.strip()}")
