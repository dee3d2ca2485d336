"""The hosts of a job from the options: lists, files, rank tables, this host, and options that contradict them."""

import socket
import sys
from pathlib import Path

import pytest

from msrun.errors import UsageError
from msrun.launch.job_hosts import is_this_host, read_job_hosts
from msrun.planning.hosts import HostEntry
from ranktable import Device, RankTable, Server, write_table

DEFAULTS = {
    **dict.fromkeys(("hosts", "hostfile", "rehearse", "include", "exclude", "python", "rank_table_file")),
    "nnodes": None,
    "local_worker_num": None,
    "spares": 0,
    "min_hosts": None,
    "max_restarts": 0,
    "ssh": False,
    "device_target": "auto",
    "worker_num": 8,
    "node_rank": -1,
    "master_addr": "127.0.0.1",
}


def read(**options):
    return read_job_hosts({**DEFAULTS, **options}, set(options))


def names(found):
    return [(entry.name, entry.slots) for entry in found.entries]


@pytest.fixture
def table(tmp_path):
    """Two servers; the second in the file has rank 0."""
    second = Server("node-a", (Device(0, 2),), "10.0.0.1")
    first = Server("node-b", (Device(4, 0), Device(5, 1)), "10.0.0.2")
    write_table(tmp_path / "table.json", RankTable("1.0", (second, first), declared_server_count=2))
    return tmp_path / "table.json"


def test_list_gives_the_numbers_of_the_job():
    found = read(hosts="h1:3,h2:1")
    assert names(found) == [("h1", 3), ("h2", 1)]
    assert (found.options["worker_num"], found.options["local_worker_num"], found.assignments) == (4, 0, ())
    assert names(read(hosts="h1,h2")) == [("h1", 1), ("h2", 1)], "the default number of workers was not given"
    assert names(read(hosts="h1,h2", worker_num=8)) == [("h1", 4), ("h2", 4)]


def test_file_is_read_and_filtered(tmp_path):
    path = tmp_path / "hosts.txt"
    path.write_bytes(b"\xef\xbb\xbfh1 slots=4\r\nh2 slots=4\r\n")
    assert names(read(hostfile=path, include="h2:1,3")) == [("h2", 2)]
    assert names(read(hostfile=path, exclude="h2")) == [("h1", 4)]


def test_interpreter_of_the_job_is_that_of_hosts_without_one_of_their_own(tmp_path):
    path = tmp_path / "hosts.txt"
    path.write_text("h1 python=/a/python\nh2\n")
    assert [entry.python for entry in read(hostfile=path, python="/b/python").entries] == ["/a/python", "/b/python"]
    assert [entry.python for entry in read(hostfile=path).entries] == ["/a/python", ""]


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1", socket.gethostname()])
def test_only_this_host_is_an_ordinary_job(name):
    found = read(hosts=f"[{name}]:4" if ":" in name else f"{name}:4", include=None)
    assert found.entries == ()
    assert (found.options["worker_num"], found.options["local_worker_num"]) == (4, 4)


def test_devices_of_only_this_host_are_kept():
    (assignment,) = read(hosts="localhost:4", include="localhost:1,3").assignments
    assert (assignment.ranks, assignment.device_ids) == ((0, 1), (1, 3))


@pytest.mark.parametrize(
    ("options", "agents"),
    [
        ({"hosts": "me@localhost:2"}, [("localhost", 2)]),
        ({"hosts": "localhost:2", "python": "/opt/python"}, [("localhost", 2)]),
        ({"hosts": "localhost:2", "python": sys.executable}, []),
        ({"hosts": "localhost:2,h2:2"}, [("localhost", 2), ("h2", 2)]),
        ({"hosts": "localhost:2,h2:2", "spares": 1, "max_restarts": 1}, [("localhost", 2)]),
        ({"rehearse": "1x2"}, [("host0", 2)]),
        ({"rehearse": "2x2", "exclude": "host1:0"}, [("host0", 2), ("host1", 1)]),
    ],
)
def test_agents_are_where_this_host_alone_as_this_user_is_not_enough(options, agents):
    assert names(read(**options)) == agents


def test_host_is_this_one_by_name_address_and_loopback():
    assert is_this_host(HostEntry("LOCALHOST")) and is_this_host(HostEntry("127.9.9.9"))
    assert is_this_host(HostEntry("alias", address="127.0.0.1"))
    assert not is_this_host(HostEntry("no-such-host")) and not is_this_host(HostEntry("192.0.2.1"))
    assert not is_this_host(HostEntry("localhost", port=2222)) and not is_this_host(HostEntry("localhost", user="me"))


def test_servers_of_a_table_are_the_hosts(table):
    found = read(ssh=True, rank_table_file=table)
    assert names(found) == [("10.0.0.2", 2), ("10.0.0.1", 1)]
    assert [entry.device_ids for entry in found.entries] == [(4, 5), (0,)]
    assert [assignment.ranks for assignment in found.assignments] == [(0, 1), (2,)]
    assert [entry.address for entry in found.entries] == ["10.0.0.2", "10.0.0.1"]


def test_list_may_name_the_hosts_of_a_table_in_its_own_words(table):
    found = read(hosts="me@node-a,node-b:2", rank_table_file=table)
    assert names(found) == [("node-b", 2), ("node-a", 1)]
    assert [(entry.user, entry.address) for entry in found.entries] == [("", "10.0.0.2"), ("me", "10.0.0.1")]


FILE = Path("table")
TABLE = {"rank_table_file": FILE}
REHEARSED = {"rehearse": "2x2"}
LISTED = {"hosts": "node-b:2,node-a:1"}
AGAIN = {**LISTED, "max_restarts": 1}
REFUSED = [
    ({"hosts": "h1", "hostfile": Path("f")}, "--hosts and --hostfile: give one of the two"),
    ({"include": "h1"}, "--include h1: for hosts of --hosts, --hostfile, --rehearse or --ssh; without them leave it"),
    ({"exclude": "h1"}, "--exclude h1: for hosts of"),
    ({"spares": 1}, "--spares 1: for hosts of"),
    ({"min_hosts": 1}, "--min_hosts 1: for hosts of"),
    ({"python": "/p"}, "--python /p: for hosts of .* without them start msrun with that Python"),
    ({"hosts": "h1,h2", "master_addr": "localhost"}, "--master_addr localhost: .*give the address of h1"),
    ({"hosts": "h1,h2:4", "worker_num": 3}, "--worker_num 3: leaves -1 workers for h1"),
    ({"hosts": "h1:2", "local_worker_num": 3}, "--local_worker_num 3: --hosts gives h1 2 slots"),
    ({"hosts": "h1", "include": "h2"}, "--include h2: h2 is none of the job's hosts"),
    ({"hosts": "h1", "include": "h1", "exclude": "h1"}, "--include and --exclude: give one"),
    ({"hostfile": Path("/no/such/file")}, r"--hostfile /no/such/file: cannot be read \(No such file"),
    ({"hostfile": Path("/proc")}, r"--hostfile /proc: cannot be read \(Is a directory\)"),
    ({"hostfile": Path("/dev/zero")}, "--hostfile /dev/zero: cannot be read .more than 4000000 bytes"),
    ({"hosts": "h1", "rank_table_file": Path("/no/table")}, "--rank_table_file /no/table: "),
    # a list and a table that differ
    ({"hosts": "node-a", **TABLE}, "its server node-b is no host of --hosts; name the same hosts in both"),
    ({"hosts": "node-a,node-b,h3", **TABLE}, "--hosts: h3 is no server of --rank_table_file"),
    ({"hosts": "node-a:2,node-b", **TABLE}, "--hosts: node-a has 2 slots, in --rank_table_file .* it has 1"),
    ({"hosts": "node-a,node-b", "worker_num": 4, **TABLE}, "--worker_num 4: the slots of 2 hosts add up to 3"),
    ({"hosts": "node-a,node-b", "include": "node-a", **TABLE}, "--include node-a: --rank_table_file names every work"),
    ({"ssh": True, "exclude": "node-a", **TABLE}, "--exclude node-a: .*make the table of those hosts with ranktable"),
    # a rehearsal that contradicts other options
    ({**REHEARSED, "hosts": "h1"}, "--hosts and --rehearse: give one of the two"),
    ({**REHEARSED, "ssh": True}, "--rehearse and --ssh: give one of the two"),
    ({**REHEARSED, "master_addr": "10.0.0.1"}, "--master_addr 10.0.0.1: the hosts of --rehearse meet at 127.0.0.2"),
    ({**REHEARSED, "node_rank": 1}, "--node_rank 1: hosts are numbered in the order of their list"),
    ({**REHEARSED, **TABLE}, "--rehearse 2x2: host1 has 2 slots, in --rank_table_file .* it has 1"),
    ({"rehearse": "3x1", **TABLE}, "--rehearse 3x1: 3 hosts, but .* has 2 servers"),
    # losses that cannot be borne
    ({**AGAIN, "spares": 2}, r"--spares 2: must be 0 to 1; one of the 2 hosts"),
    ({**AGAIN, "min_hosts": 3}, r"--min_hosts 3: must be 1 to 2, the number of hosts of the job"),
    ({**AGAIN, "min_hosts": 0}, r"--min_hosts 0: must be 1 to 2"),
    ({**LISTED, "spares": 1}, r"--spares 1: the job starts again as often as --max_restarts says; give 1"),
    ({**AGAIN, "min_hosts": 1, **TABLE}, r"--min_hosts 1: --rank_table_f"),
    ({**LISTED, "nnodes": "1:2"}, r"--nnodes 1:2: the job starts again as often as --max_restarts says; give 1 or mor"),
    ({**AGAIN, "nnodes": "3:4"}, r"--nnodes 3:4: the list has 2 hosts; name 3 or more"),
    ({**AGAIN, "nnodes": "4:2"}, r"--nnodes 4:2: give MIN:MAX, such as 2:4, or one number"),
    ({**AGAIN, "nnodes": "2:"}, r"--nnodes 2:: give MIN:MAX"),
    ({**AGAIN, "nnodes": "0"}, r"--nnodes 0: give MIN:MAX"),
    ({**AGAIN, "nnodes": "1:2", "min_hosts": 1}, r"--nnodes 1:2 and --min_hosts 1: give one of the two"),
    ({"nnodes": "2"}, r"--nnodes 2: for hosts of --hosts, .*; without them give --worker_num"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_that_contradict_each_other_are_refused(table, options, message):
    with pytest.raises(UsageError, match=message):
        read(**{name: table if value is FILE else value for name, value in options.items()})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("10.0.0.2", "-oProxyCommand=x", "'-oProxyCommand=x' starts with '-'"),
        ('"server_count": "2"', '"server_count": "3"', ".*server_count"),
        ('"rank_id": "2"', '"rank_id": "5"', "its rank_ids are not 0 to 2"),
    ],
)
def test_table_that_breaks_a_rule_is_refused(table, old, new, message):
    table.write_text(table.read_text().replace(old, new))
    with pytest.raises(UsageError, match=rf"--rank_table_file .*table\.json: {message}"):
        read(ssh=True, rank_table_file=table)


def test_hostfile_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "f").write_bytes(b"h1\xff\n")
    with pytest.raises(UsageError, match="not UTF-8 text"):
        read(hostfile=tmp_path / "f")


def test_rehearsed_hosts_are_agents_at_addresses_of_loopback():
    found = read(rehearse="2x3")
    entries = [(entry.name, entry.slots, entry.address) for entry in found.entries]
    assert entries == [("host0", 3, "127.0.0.2"), ("host1", 3, "127.0.0.3")]
    assert (found.options["worker_num"], found.options["local_worker_num"], found.assignments) == (6, 0, ())


def test_rehearsed_hosts_stand_for_the_servers_of_a_table_in_its_order(table):
    found = read(rehearse="2", rank_table_file=table)
    entries = [(entry.name, entry.device_ids, entry.address) for entry in found.entries]
    assert entries == [("host0", (4, 5), "127.0.0.2"), ("host1", (0,), "127.0.0.3")]
    assert [assignment.ranks for assignment in found.assignments] == [(0, 1), (2,)]


def test_last_hosts_of_the_list_are_spare():
    found = read(hosts="h[1-4]:2", spares=1, max_restarts=2)
    assert names(found) == [("h1", 2), ("h2", 2), ("h3", 2)]
    assert [(entry.name, entry.slots) for entry in found.spares] == [("h4", 2)]
    assert (found.options["worker_num"], found.options["min_hosts"]) == (6, 3)
    assert read(hosts="h1:2,h2:2", max_restarts=1).options["min_hosts"] == 0, "a lost host ends the job"
    shared = read(hosts="h1,h2,h3", spares=1, worker_num=4, max_restarts=1, min_hosts=1)
    assert [entry.slots for entry in (*shared.entries, *shared.spares)] == [2, 2, 2]
    assert shared.options["min_hosts"] == 1


@pytest.mark.parametrize(
    ("nnodes", "hosts", "spares", "min_hosts"),
    [("2:4", 6, 2, 2), ("2:4", 3, 0, 2), ("2:4", 2, 0, 0), ("3", 3, 0, 0), ("3", 5, 2, 3), ("3:3", 4, 1, 3)],
)
def test_nnodes_in_the_words_of_torchrun_says_which_hosts_run_and_how_few_may(nnodes, hosts, spares, min_hosts):
    """MAX hosts of the list run the job as far as there are so many, the others are spare."""
    found = read(hosts=f"h[1-{hosts}]:2", nnodes=nnodes, max_restarts=1)
    assert (len(found.entries), len(found.spares), found.options["min_hosts"]) == (hosts - spares, spares, min_hosts)
