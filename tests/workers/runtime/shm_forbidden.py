"""What a job does whose container forbids a rank a system call that the backend shm needs.

usage: shm_forbidden.py FOLDER NUMBER RANK     system call NUMBER fails in RANK; each rank writes FOLDER/RANK.json
"""

import ctypes
import json
import os
import sys
from pathlib import Path

FOLDER, NUMBER, RANK = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
EPERM = 1
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
REFUSE, ALLOW = 0x00050000 | EPERM, 0x7FFF0000


class Step(ctypes.Structure):
    """sock_filter of linux/filter.h."""

    _fields_ = (("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("value", ctypes.c_uint32))


class Filter(ctypes.Structure):
    """sock_fprog of linux/filter.h."""

    _fields_ = (("count", ctypes.c_ushort), ("steps", ctypes.POINTER(Step)))


def forbid(number):
    """Have a system call fail in this process from now on."""
    steps = (Step * 4)((LOAD, 0, 0, 0), (JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(Filter(4, steps)), 0, 0) == 0


if int(os.environ["RANK"]) == RANK:
    forbid(NUMBER)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from msrun.runtime import get_rank, init, release  # noqa: E402

init(timeout_s=30)
value = torch.ones(3)
dist.all_reduce(value)
group = dist.new_group([0, 1])
if get_rank() < 2:
    dist.all_reduce(value, group=group)
name = dist.group.WORLD._get_backend(torch.device("cpu")).name()
(FOLDER / f"{get_rank()}.json").write_text(json.dumps([name, value.tolist()]))
release()
