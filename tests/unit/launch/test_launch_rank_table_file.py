"""The table of the job, generated or the user's and checked."""

import contextlib
import json
import re
import stat
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plans import small_plan

from msrun.errors import RendezvousTimeout, UsageError
from msrun.launch.job_hosts import read_host_list, read_table_hosts
from msrun.launch.rank_table_file import await_rank_table, check_rank_table, linked_table, write_rank_table
from ranktable import encode_table, read_table


def write_table(folder, workers, text=None):
    """Write the table of a job of so many workers and return its path."""
    write_rank_table(small_plan(folder, workers), text)
    return folder / "rank_table.json"


@pytest.mark.parametrize("workers", [1, 2, 300])
def test_generated_table_is_private_what_ranktable_writes_and_passes_its_own_check(tmp_path, workers):
    path = write_table(tmp_path, workers)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == encode_table(read_table(path))
    check_rank_table(path, workers, "cpu")


@pytest.mark.parametrize("text", [None, "{}"])
def test_a_link_in_the_place_of_the_table_is_replaced_and_not_followed(tmp_path, text):
    victim = tmp_path / "victim"
    victim.write_text("old")
    (tmp_path / "rank_table.json").symlink_to(victim)
    table = write_table(tmp_path, 2, text)
    assert victim.read_text() == "old"
    assert stat.S_ISREG(table.lstat().st_mode) and stat.S_IMODE(table.stat().st_mode) == 0o600


def test_generated_table_has_one_device_for_each_worker(tmp_path):
    (server,) = json.loads(write_table(tmp_path, 3).read_text())["server_list"]
    devices = [(device["device_id"], device["rank_id"]) for device in server["device"]]
    assert devices == [(rank, rank) for rank in ("0", "1", "2")]


def test_table_of_devices_that_no_ascend_host_has_is_refused(tmp_path):
    write_rank_table(replace(small_plan(tmp_path, 32), device_target="ascend"))
    with pytest.raises(UsageError, match=r"rank table of this job: server_list\[0\]\.device\[32\]\.device_id: "):
        write_rank_table(replace(small_plan(tmp_path, 33), device_target="ascend"))


def test_table_of_another_size_is_refused(tmp_path):
    with pytest.raises(UsageError, match="holds 3 ranks but --worker_num is 2"):
        check_rank_table(write_table(tmp_path, 3), 2, "cpu")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"{}"])
def test_file_that_is_no_table_is_refused_with_its_name(tmp_path, content):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"--rank_table_file .*t\.json: "):
        check_rank_table(tmp_path / "t.json", 1, "cpu")
    with pytest.raises(UsageError, match="no plain file, and every worker reads it; give a file"):
        check_rank_table(tmp_path, 1, "cpu")


def test_rank_that_appears_twice_is_refused_with_its_place(tmp_path):
    path = write_table(tmp_path, 2)
    path.write_text(re.sub(r'"rank_id": ?"1"', '"rank_id": "0"', path.read_text()))
    with pytest.raises(UsageError, match=r"--rank_table_file .*rank_table\.json: .*rank"):
        check_rank_table(path, 2, "cpu")


def test_log_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "rank_table.json").mkdir()
    with pytest.raises(UsageError, match=r"--log_dir .*: .*rank_table\.json"):
        write_table(tmp_path, 1)


def test_table_is_awaited_until_its_producer_has_completed_it(tmp_path):
    path = tmp_path / "hccl.json"
    path.write_text('{"status": "initializing"}')
    said = []

    def tell(text):
        said.append(text)
        path.write_text('{"status": "completed"}')

    await_rank_table(path, -1, tell)
    assert said == [f'--rank_table_file {path}: its status is "initializing"; waiting until it is "completed"']


def test_table_that_is_never_completed_ends_with_the_time_limit(tmp_path):
    path = tmp_path / "hccl.json"
    path.write_text('{"status": "initializing"}')
    with pytest.raises(RendezvousTimeout, match=r'--cluster_time_out 0: the status of .* is still "initializing"'):
        await_rank_table(path, 0, lambda _text: None)


@pytest.mark.parametrize("content", ['{"status": "completed"}', "{}", "[]", "no JSON", "[" * 100_000, "initializing"])
def test_other_content_is_not_awaited(content, tmp_path):
    path = tmp_path / "hccl.json"
    path.write_text(content)
    await_rank_table(path, 0, pytest.fail)
    await_rank_table(tmp_path / "absent.json", 0, pytest.fail)


def test_table_behind_a_link_is_read_for_a_copy_and_no_other(tmp_path):
    plain, link = tmp_path / "plain.json", tmp_path / "link.json"
    plain.write_text("text")
    link.symlink_to(plain)
    assert (linked_table(None), linked_table(plain), linked_table(link)) == (None, None, "text")
    plain.unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        linked_table(link)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 600), st.integers(0, 40), st.sampled_from(["", "null", "-1", '""', "[]", "{}", "9" * 30, "\0"]))
def test_no_damage_to_a_table_is_more_than_a_refusal(tmp_path, begin, length, junk):
    text = write_table(tmp_path, 4).read_text()
    damaged = tmp_path / "damaged.json"
    damaged.write_text(text[:begin] + junk + text[begin + length :])
    for use in (read_host_list, read_table_hosts, lambda path: check_rank_table(path, 4, "ascend")):
        with contextlib.suppress(UsageError):
            use(damaged)
