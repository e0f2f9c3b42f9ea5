"""Whether a file is on a network file system: SQLite cannot be written there by several hosts.

Its write-ahead log has an index in memory that processes of one host share, and locks of network file systems are often
missing or local to a host. Two writers would damage the file, and none would notice.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

VARIABLE = "FP8TUNE_NETWORK_FILES"
"""The environment variable that allows it, where one process at a time is seen to."""

_TYPES = """
    afs beegfs ceph cifs coda fhgfs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs panfs pvfs2 smb3 smbfs
    wekafs
"""
"""File systems that several hosts mount. Not 9p and virtiofs: by these a host shares files with its own guests."""

_FUSE = """
    beegfs ceph ceph-fuse daos dfuse davfs gcsfuse glusterfs goofys juicefs mfs mount-s3 mountpoint-s3 moosefs quobyte
    rclone s3fs smbnetfs sshfs
"""
"""The same as programs: the type is ``fuse.sshfs``."""

_NETWORK = frozenset([*_TYPES.split(), *(f"fuse.{name}" for name in _FUSE.split())])
_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(r"\\([0-7]{3})")


def type_of(path: Path) -> str | None:
    """The type of the network file system that a file is on, or would be; None elsewhere and where it is not known."""
    with contextlib.suppress(OSError):
        mounts = os.fsdecode(_MOUNTS.read_bytes())
        return network_type(mounted_type(os.path.realpath(path), mounts))
    return None


def is_allowed() -> bool:
    """Whether the user knows better."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def network_type(name: str | None) -> str | None:
    """The name of a file system's type if several hosts mount it."""
    return name if name in _NETWORK else None


def mounted_type(path: str, mounts: str) -> str | None:
    """The type of what is mounted at an absolute path, or above it, by the text of ``/proc/self/mountinfo``.

    Of several at one place the last hides the others.
    """
    found, longest = None, -1
    for line in mounts.split("\n"):  # a name may hold any other sign that ends a line
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        place = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4]).rstrip("/")
        if len(place) >= longest and (path == place or path.startswith(f"{place}/")):
            found, longest = after.split(" ")[0], len(place)
    return found
