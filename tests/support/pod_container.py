"""Starts a container as the kubelet does: `python pod_container.py SPEC.json [WORDS]`, as root in a pod's network.

The process gets a host name and mounts of its own, on a root that has what this machine has, and becomes the command of
the container: what it is sent and how it ends is that of the container.
"""

import ctypes
import json
import os
import socket
import sys
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_NAMES, _NEW_MOUNTS = 0x04000000, 0x00020000
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000


def _call(result, what):
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source, target, kind, flags):
    words = (source.encode(), bytes(target), kind.encode())
    _call(_LIBC.mount(*words, flags, None), f"mount {source} at {target}")


def _bind(source, target):
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    _mount(str(source), target, "", _BIND | _RECURSIVE)


def _build_root(root, mounts):
    """Make a root with all folders of this machine's, and `mounts`, paths inside it to what is to be found there."""
    _mount("none", Path("/"), "", _RECURSIVE | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", 0)
    for entry in Path("/").iterdir():
        if entry.is_symlink():
            (root / entry.name).symlink_to(entry.readlink())
        elif entry.is_dir():
            _bind(entry, root / entry.name)
    for inside, source in mounts.items():
        place = root / inside.lstrip("/")
        if source == "tmpfs":
            place.mkdir(parents=True, exist_ok=True)
            _mount("tmpfs", place, "tmpfs", 0)
        else:
            _bind(Path(source), place)


def main():
    """Become the container."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    _call(_LIBC.unshare(_NEW_NAMES | _NEW_MOUNTS), "unshare")
    socket.sethostname(spec["host_name"])
    _build_root(Path(spec["root"]), spec["mounts"])
    os.chroot(spec["root"])
    os.chdir(spec["working_directory"])
    words = sys.argv[2:] or spec["words"]  # others than its command, as an SSH server in it starts them
    os.execvpe(words[0], words, spec["env"])


if __name__ == "__main__":
    main()
