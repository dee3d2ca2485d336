"""Why a worker has ended, from its log, its wait status and what torch's `record` has left."""

import json
import os
import resource
import signal
from types import SimpleNamespace

import pytest

from msrun.agent.evidence import FULL_BYTES, explain_end, explain_full_disk, explain_limit

ASKED = "Traceback (most recent call last):\nEOFError: EOF when reading a line\n"
LONG = "ValueError: " + "9" * 200
FAILED = 1 << 8


@pytest.mark.parametrize(
    ("log", "has_input", "recorded", "expected"),
    [
        (ASKED, False, "", "its standard input is empty: --interactive=3 gives it yours"),
        ("(Pdb) \nbdb.BdbQuit\n", False, "", "its standard input is empty: --interactive=3 gives it yours"),
        (ASKED, True, "", ""),
        (ASKED + "and more\n", False, "", ""),
        ("", True, json.dumps({"message": {"message": "\n  ValueError: no\nsecond"}}), "ValueError: no"),
        ("", True, json.dumps({"message": "OSError: gone"}), "OSError: gone"),
        ("", True, json.dumps({"message": LONG[:200]}), LONG[:200]),
        ("", True, json.dumps({"message": LONG}), LONG[:200] + " ..."),
        ("", True, json.dumps({"message": " "}), ""),
        ("", True, json.dumps(["message"]), ""),
        ("", True, "{", ""),
    ],
)
def test_end_of_a_worker_is_explained_by_what_it_left(tmp_path, log, has_input, recorded, expected):
    (tmp_path / "log").write_text(log)
    (tmp_path / "recorded").write_text(recorded)
    assert explain_end(FAILED, str(tmp_path / "log"), 3, has_input, str(tmp_path / "recorded")) == expected


def test_log_directory_that_was_removed_explains_an_end(tmp_path):
    gone = tmp_path / "gone"
    assert f"removed ({gone})" in explain_end(FAILED, str(gone / "log"), 0, has_input=True, recorded="")
    assert explain_full_disk("/proc/self/status") == "", "a file system that does not count"


@pytest.mark.parametrize(
    ("bytes_left", "for_root", "files", "files_left", "is_full"),
    [
        (FULL_BYTES, FULL_BYTES, 0, 0, False),
        (FULL_BYTES - 512, FULL_BYTES, 9, 1, True),
        (FULL_BYTES, 1 << 30, 9, 0, True),
    ],
)
def test_disk_without_room_or_files_explains_an_end(monkeypatch, bytes_left, for_root, files, files_left, is_full):
    left = {"f_bavail": bytes_left // 512, "f_bfree": for_root // 512, "f_files": files, "f_favail": files_left}
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=9, f_frsize=512, **left))
    for user, expected in ((1, is_full), (0, is_full and not files_left)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        found = explain_full_disk("/logs/log")
        assert found == "the disk of its log is full (/logs): make room, or give another --log_dir" * expected


@pytest.mark.parametrize(
    ("limit", "value", "status", "expected"),
    [
        (resource.RLIMIT_CPU, 5, signal.SIGXCPU, "ulimit -t 5: it may use 5 s of CPU time; raise"),
        (resource.RLIMIT_CPU, 5, signal.SIGKILL, "ulimit -t 5: "),
        (resource.RLIMIT_CPU, 5, FAILED, ""),
        (resource.RLIMIT_AS, 1 << 20, FAILED, "ulimit -v 1024: it may have 1024 KiB of address space; raise"),
        (resource.RLIMIT_AS, 1 << 20, 0, ""),
        (None, 5, FAILED, ""),
    ],
)
def test_limit_that_has_ended_a_worker_is_named(tmp_path, monkeypatch, limit, value, status, expected):
    (tmp_path / "log").write_text("MemoryError\n")
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (value if asked == limit else resource.RLIM_INFINITY, 0))
    found = explain_limit(status, str(tmp_path / "log"))
    assert found.startswith(expected) and bool(found) == bool(expected)
    assert explain_limit(status, "/no/log") == ("" if limit == resource.RLIMIT_AS else found)
