"""Which jobs one warm server can serve."""

from __future__ import annotations

import os
from pathlib import Path

from msrun.agent.warm.warm_start import changed_file, likeness, read_at_import

ENV = {"PATH": "/bin", "PYTHONPATH": "/a:/b", "OMP_NUM_THREADS": "1", "FOO": "1"}


def test_only_what_has_its_effect_at_import_makes_jobs_unlike() -> None:
    own = likeness(ENV, ["torch", "msrun.runtime:init"], "/work")
    for env in (
        {**ENV, "FOO": "2"},
        {**ENV, "GLOO_SOCKET_IFNAME": "eth7"},
        {**ENV, "PATH": "/usr/bin"},
        {**ENV, "MASTER_PORT": "1"},
    ):
        assert likeness(env, ["torch.nn", "msrun"], "/elsewhere") == own
    for env in ({**ENV, "LD_PRELOAD": "x.so"}, {**ENV, "TORCH_SHOW_CPP_STACKTRACES": "1"}):
        assert likeness(env, ["torch", "msrun"], "/work") != own
    assert likeness(ENV, ["torch"], "/work") != own, "another package"


def test_a_search_path_relative_to_the_directory_binds_a_server_to_it() -> None:
    env = {**ENV, "PYTHONPATH": "lib"}
    assert likeness(env, ["torch"], "/work") != likeness(env, ["torch"], "/elsewhere")


def test_priority_and_cores_make_jobs_unlike() -> None:
    own = likeness(ENV, ["torch"], "/")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert (likeness(ENV, ["torch"], "/") == own) == (len(cores) == 1)
    finally:
        os.sched_setaffinity(0, cores)
    assert likeness(ENV, ["torch"], "/") == own


def test_a_server_knows_no_secret_of_the_user() -> None:
    assert read_at_import({**ENV, "AWS_SECRET_ACCESS_KEY": "x", "MSRUN_TOKEN": "y"}) == {
        name: ENV[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")
    }


def test_a_file_that_was_changed_or_removed_is_named(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("1")
    other.write_text("2")
    files = {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in (one, other)}
    assert changed_file(files) == ""
    other.write_text("22")
    assert changed_file(files) == str(other)
    one.unlink()
    assert changed_file(files) == str(one)
