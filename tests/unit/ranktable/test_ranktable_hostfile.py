"""Host files of other launchers, filters over them, and the hosts of a Slurm job."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import BuildError, RankTableError, SourceError
from ranktable.sources.hostfile import (
    HOSTFILE_FORMATS,
    detect_format,
    parse_hostfile,
    parse_task_counts,
    read_hostfile,
    read_slurm_hosts,
)
from ranktable.sources.option_values import filter_hosts


def hosts_of(text, form="auto"):
    return [(host.name, host.num_slots) for host in parse_hostfile(text.encode(), "hosts", form)]


@pytest.mark.parametrize(
    ("text", "form", "hosts"),
    [
        ("# mine\n\na slots=8\nb  slots=4  # half\n", "deepspeed", [("a", 8), ("b", 4)]),
        ("a slots=8 max_slots=16\nb slots = 4\n", "openmpi", [("a", 8), ("b", 4)]),
        ("root@a slots=8\na max-slots=9 slots=1\nb\nb\nc\n", "openmpi", [("a", 9), ("b", 2), ("c", None)]),
        ("a slots=8\nb\n", "openmpi", [("a", 8), ("b", None)]),
        ("a:8\nb:4 ifname=ib0\nc\na:1\n", "mpich", [("a", 9), ("b", 4), ("c", 1)]),
        ("[fe80::1]:8\nfe80::2\n", "mpich", [("fe80::1", 8), ("fe80::2", 1)]),
        ("node[08-09,11]\nother\n", "slurm", [("node08", None), ("node09", None), ("node11", None), ("other", None)]),
        ("10.0.0.1\r\n10.0.0.2", "plain", [("10.0.0.1", None), ("10.0.0.2", None)]),
        ("\ufefffe80::1\n", "plain", [("fe80::1", None)]),
    ],
)
def test_each_format_is_read_and_recognised(text, form, hosts):
    assert hosts_of(text, form) == hosts
    assert hosts_of(text) == hosts
    lines = (line.partition("#")[0].strip() for line in text.strip("\ufeff").splitlines())
    assert detect_format(line for line in lines if line) == form


@pytest.mark.parametrize(
    ("text", "form", "says"),
    [
        ("", "auto", "hosts: the file names no host"),
        ("# only\n", "auto", "names no host"),
        ("a slots=8\na slots=8\n", "auto", "hosts:2: host 'a' stands at hosts:1 already; DeepSpeed refuses that"),
        ("a slots=8\na slots=8\n", "deepspeed", "remove one of the two"),
        ("a\na\n", "auto", "hosts:2: host 'a' stands at hosts:1 already"),
        ("a slots=0\n", "auto", "hosts:1: '0' is no number of slots"),
        ("a slots=x\n", "auto", "hosts:1: 'x' is no number of slots"),
        ("a slots=99999\n", "auto", "'99999' is no number of slots"),
        ("a slots=8\nb 4\n", "deepspeed", "hosts:2: 'b 4' is no line of DeepSpeed's host file; write  b slots=8"),
        ("a slots=9 max_slots=8\n", "auto", "slots=9 is more than max_slots=8"),
        ("a socket=1 slots=1\n", "openmpi", "'socket=1' is not known in a host file of Open MPI"),
        ("+n0 slots=2\n", "openmpi", "'+n0' is a place in an allocation"),
        ("rank 0=a slot=1\n", "openmpi", "a line of a rank file"),
        ("a:8 what\n", "mpich", "'what' is not known in a host file of MPICH"),
        ("a:\n", "mpich", "'' is no number of slots"),
        ("node[1-\n", "slurm", "hosts:1: host list: 'node[1-' has a [ without its other half"),
        ("a b\n", "plain", "'a b' is more than a name"),
        ("a,b\n", "plain", "'a,b' is not one host"),
        ("a:8\n", "plain", "'a:8' is not one host"),
        ("-a\n", "plain", "'-a' is no host name or address"),
    ],
)
def test_a_wrong_line_is_named_with_file_and_line(text, form, says):
    with pytest.raises(SourceError) as caught:
        parse_hostfile(text.encode(), "hosts", form)
    assert says in str(caught.value)
    assert caught.value.remedy


def test_a_file_that_is_not_utf_8_is_refused_with_its_line():
    with pytest.raises(SourceError, match="hosts:2: byte 0xff is not UTF-8"):
        parse_hostfile(b"a\n\xff\n", "hosts")


def test_a_host_file_is_read_from_disk(tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\n")
    (host,) = read_hostfile(str(tmp_path / "hosts"))
    assert (host.name, host.num_slots, host.origin) == ("a", 2, f"{tmp_path}/hosts:1")


@settings(deadline=None, max_examples=60)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.text("ab[]:,@+= #\n\t0123456789slotmax_-", max_size=60).map(str.encode),
    ),
    st.sampled_from(HOSTFILE_FORMATS),
)
def test_any_text_is_hosts_or_an_error_in_words(data, form):
    try:
        listed = parse_hostfile(data, "hosts", form)
    except RankTableError as error:
        assert error.remedy
        return
    assert listed
    assert len({host.name for host in listed}) == len(listed)


HOSTS = [("a", range(4)), ("b", range(4)), ("fe80::1", range(2))]


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("a", None, {"a": [0, 1, 2, 3]}),
        ("b:0,2@a:3", None, {"a": [3], "b": [0, 2]}),
        ("a:1@a:2", None, {"a": [1, 2]}),
        ("a:0-2", None, {"a": [0, 1, 2]}),
        ("fe80::1", None, {"fe80::1": [0, 1]}),
        ("[fe80::1]:1", None, {"fe80::1": [1]}),
        (None, "a@fe80::1", {"b": [0, 1, 2, 3]}),
        (None, "a:0@b:0,1,2,3", {"a": [1, 2, 3], "fe80::1": [0, 1]}),
        (None, None, {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3], "fe80::1": [0, 1]}),
    ],
)
def test_include_and_exclude_choose_hosts_and_devices(include, exclude, left):
    chosen = filter_hosts(HOSTS, include=include, exclude=exclude)
    assert {name: list(ids) for name, ids in chosen} == left


@pytest.mark.parametrize(
    ("include", "exclude", "says"),
    [
        ("a", "b", "--include and --exclude are both given"),
        ("c", None, "'c' is not in the list of hosts"),
        ("a:7", None, "host 'a' has no device 7; it has 4 devices"),
        ("a:x", None, "has 'x' for device ids"),
        (None, "a@b@fe80::1", "--exclude leaves no device"),
        ("", None, "'' is not in the list of hosts"),
    ],
)
def test_a_filter_that_fits_no_host_is_refused(include, exclude, says):
    with pytest.raises(BuildError) as caught:
        filter_hosts(HOSTS, include=include, exclude=exclude)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "hosts"),
    [
        (
            {"SLURM_JOB_NODELIST": "rack[1-2]n[08-09],login", "SLURM_TASKS_PER_NODE": "8(x4),4"},
            [("rack1n08", 8), ("rack1n09", 8), ("rack2n08", 8), ("rack2n09", 8), ("login", 4)],
        ),
        ({"SLURM_NODELIST": "a", "SLURM_TASKS_PER_NODE": "2"}, [("a", 2)]),
        ({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS_PER_NODE": "8"}, [("n1", 8), ("n2", 8)]),
        ({"SLURM_JOB_NODELIST": "n[1-2]"}, [("n1", None), ("n2", None)]),
    ],
)
def test_the_hosts_of_a_slurm_job_are_read_from_its_environment(variables, hosts):
    assert [(host.name, host.num_slots) for host in read_slurm_hosts(variables)] == hosts


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({}, "SLURM_JOB_NODELIST: the variable is not set"),
        ({"SLURM_JOB_NODELIST": "n[1-"}, "SLURM_JOB_NODELIST: 'n[1-' has a [ without its other half"),
        ({"SLURM_JOB_NODELIST": "n1:8"}, "host 'n1' has a count"),
        ({"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "8(x2)"}, "counts 2 hosts, SLURM_JOB_NODELIST names 1"),
        ({"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "8(2)"}, "'8(2)' is no count of tasks"),
        ({"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "8(x999999)"}, "counts more than"),
    ],
)
def test_variables_of_slurm_that_do_not_fit_are_named(variables, says):
    with pytest.raises(SourceError) as caught:
        read_slurm_hosts(variables)
    assert says in str(caught.value)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 999), st.integers(1, 9)), min_size=1, max_size=6))
def test_folded_counts_are_unfolded(groups):
    text = ",".join(f"{count}(x{repeats})" if repeats > 1 else str(count) for count, repeats in groups)
    assert parse_task_counts(text) == [count for count, repeats in groups for _ in range(repeats)]
