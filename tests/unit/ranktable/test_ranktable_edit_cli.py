"""The commands that make tables out of tables: output, files and exit status."""

import json
from pathlib import Path

import pytest

from ranktable import build_table, encode_table, read_table


def write(name, hosts, **options):
    """Write a table and return its text."""
    text = encode_table(build_table(hosts, **options))
    Path(name).write_text(text)
    return text


THREE = [("10.0.0.9", 2), ("10.0.0.10", 2), ("10.0.0.11", 2)]


@pytest.mark.parametrize(
    ("split", "merge"),
    [
        (["--per_server", "--keep_ranks"], ["--order", "rank"]),
        (["--servers", "2", "--keep-ranks"], ["--order", "rank"]),
        (["--per-server"], []),
        (["--per_server"], ["--order", "argument"]),
    ],
)
def test_split_and_merge_give_the_file_back_byte_for_byte(run, split, merge):
    text = write("t.json", THREE)
    status, out, err = run("split", "t.json", *split, "-o", "parts")
    assert (status, out) == (0, "")
    assert "tables to parts: part_000_10.0.0.10.json to part_00" in err
    status, out, err = run("merge", *merge, *sorted(Path("parts").iterdir()), "-o", "m.json")
    assert (status, out) == (0, "")
    assert "wrote m.json: 3 servers, 6 devices" in err
    assert Path("m.json").read_text() == text


def test_super_pods_are_split_and_merged_byte_for_byte(run):
    table = json.loads(write("t.json", THREE)) | {"version": "1.2"}
    table["super_pod_list"] = [
        {"super_pod_id": "0", "server_list": [{"server_id": "10.0.0.10"}, {"server_id": "10.0.0.11"}]},
        {"super_pod_id": "1", "server_list": [{"server_id": "10.0.0.9"}]},
    ]
    for place, server in enumerate(table["server_list"]):
        for device in server["device"]:
            device["super_device_id"] = str(2 * place + int(device["device_id"]))
    Path("t.json").write_text(json.dumps(table))
    assert run("split", "t.json", "--per_super_pod", "-o", "parts")[0] == 0
    assert sorted(path.name for path in Path("parts").iterdir()) == ["part_000_0.json", "part_001_1.json"]
    assert run("merge", "parts/part_001_1.json", "parts/part_000_0.json", "-o", "m.json")[0] == 0
    assert run("diff", "t.json", "m.json") == (0, "t.json and m.json say the same\n", "")
    assert read_table("m.json") == read_table("t.json")
    assert run("merge", "--order", "argument", "parts/part_000_0.json", "parts/part_001_1.json", "-o", "n.json")[0] == 0
    assert Path("n.json").read_bytes() == Path("m.json").read_bytes()


def test_merge_prints_and_says_its_order(run):
    write("b.json", [("10.0.0.9", 1)])
    write("a.json", [("10.0.0.10", 1)])
    status, out, err = run("merge", "b.json", "a.json")
    assert status == 0
    assert [server["server_id"] for server in json.loads(out)["server_list"]] == ["10.0.0.10", "10.0.0.9"]
    assert err.splitlines()[:2] == [
        "ranktable: servers follow the string order of their ids; rank 0 is on 10.0.0.10",
        "ranktable: that is not the order of the arguments",
    ]


def test_merge_takes_the_order_of_a_host_file(run):
    write("a.json", [("a", 1)])
    write("b.json", [("b", 1)])
    Path("hosts").write_text("b slots=1\na slots=1\n")
    for options in (["--hostfile", "hosts"], ["--order", "host-file", "--hostfile", "hosts"]):
        _, out, err = run("merge", "a.json", "b.json", *options)
        assert [server["server_id"] for server in json.loads(out)["server_list"]] == ["b", "a"]
        assert "servers follow the order of the host list" in err


def test_merge_lists_conflicts_and_leaves_the_file_that_is_there(run):
    write("a.json", [("a", 1), ("b", 1)])
    Path("m.json").write_text("mine")
    status, out, err = run("merge", "a.json", "a.json", "-o", "m.json")
    assert (status, out) == (1, "")
    assert err.splitlines() == [
        "ranktable: error: a.json: server a stands in a.json already; leave one out",
        "ranktable: error: a.json: server b stands in a.json already; leave one out",
        "ranktable: nothing is written",
    ]
    assert Path("m.json").read_text() == "mine"
    write("many.json", [(f"n{number}", 1) for number in range(30)])
    assert "ranktable: and 10 more\n" in run("merge", "many.json", "many.json")[2]


def test_merge_waits_for_a_table_that_is_not_completed(run):
    write("a.json", [("a", 1)])
    Path("b.json").write_text(write("b.json", [("b", 1)]).replace("completed", "initializing"))
    status, out, err = run("merge", "a.json", "b.json")
    assert (status, out) == (3, "")
    assert "b.json is not ready" in err
    status, out, _ = run("merge", "--allow_initializing", "a.json", "b.json")
    assert (status, json.loads(out)["status"]) == (0, "initializing")


def test_merge_makes_a_global_table(run):
    for place, name in enumerate("ab"):
        device = {"device_id": "0", "rank_id": "0", "super_device_id": "7"}
        pod = {"super_pod_id": str(place), "server_list": [{"server_id": name}]}
        table = {"version": "1.2", "server_count": "1", "server_list": [{"server_id": name, "device": [device]}]}
        Path(f"{name}.json").write_text(json.dumps(table | {"super_pod_list": [pod], "status": "completed"}))
    status, out, err = run("merge", "--global", "west/job=a.json", "east=b.json")
    assert status == 0
    table = json.loads(out)
    assert (table["version"], table["data_version"]) == ("1.4", 1)
    assert [cluster["cluster_id"] for cluster in table["cluster_list"]] == ["east", "west"]
    assert [server["server_id"] for server in table["server_list"]] == ["b", "a"]
    assert "clusters and jobs in order: b.json, a.json" in err


def test_select_prints_a_smaller_table(run):
    write("t.json", [("node1", 2), ("node2", 2), ("node3", 2)])
    status, out, err = run("select", "t.json", "--servers", "node[2-3]", "--devices", "1")
    assert status == 0
    assert [server["server_id"] for server in json.loads(out)["server_list"]] == ["node2", "node3"]
    assert [server["device"][0]["rank_id"] for server in json.loads(out)["server_list"]] == ["0", "1"]
    assert "ranktable: 2 of 6 devices on 2 of 3 servers\nranktable: ranks 3, 5 are ranks 0-1 now\n" in err
    assert run("select", "t.json", "--ranks", "0-3", "-o", "s.json")[0] == 0
    assert run("validate", "--device_target", "cpu", "s.json")[0] == 0


def test_select_takes_an_id_that_no_host_list_could_name(run):
    odd = json.loads(write("t.json", [("a", 1)]))
    odd["server_list"][0]["server_id"] = "odd id, with comma"
    Path("t.json").write_text(json.dumps(odd))
    assert json.loads(run("select", "t.json", "--servers", "odd id, with comma")[1]) == odd


def test_parts_do_not_go_into_a_folder_with_others(run):
    write("t.json", THREE)
    assert run("split", "t.json", "--per_server", "-o", "parts")[0] == 0
    status, _, err = run("split", "t.json", "--per_server", "-o", "parts")
    assert status == 2
    assert "cannot write parts: the folder is not empty; name a new one" in err
    assert len(list(Path("parts").iterdir())) == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["merge"], "Missing argument"),
        (["merge", "none.json"], "cannot read none.json"),
        (["merge", "t.json", "--order", "host_file"], "--order host_file needs --hostfile FILE"),
        (["merge", "t.json", "--order", "rank", "--hostfile", "t.json"], "--hostfile goes with --order host_file"),
        (["merge", "t.json", "--hostfile", "none"], "cannot read none"),
        (["merge", "t.json", "--order", "random"], "random"),
        (["merge", "--global", "t.json"], "write CLUSTER=FILE or CLUSTER/JOB=FILE"),
        (["merge", "--global", "--order", "rank", "a=t.json"], "leave --order and --hostfile out"),
        (["merge", "t.json", "-o", "no/m.json"], "create the folder no first"),
        (["select", "t.json"], "nothing is chosen; give --ranks, --servers or --devices"),
        (["select", "t.json", "--ranks", "x"], "has 'x' for a range"),
        (["select", "t.json", "--ranks", "9"], "no device of the table has rank 9"),
        (["select", "t.json", "--servers", "10.0.0.8"], "did you mean '10.0.0.9'?"),
        (["select", "t.json", "--servers", "10.0.0.9:8"], "write names only"),
        (["select", "t.json", "--servers", "a["], "has a [ without its other half"),
        (["split", "t.json", "-o", "p"], "give one of --per_server, --per_super_pod and --servers"),
        (["split", "t.json", "--per_server", "--servers", "2", "-o", "p"], "give one of"),
        (["split", "t.json", "--per_server"], "Missing option '-o'"),
        (["split", "t.json", "--servers", "0", "-o", "p"], "--servers"),
        (["split", "t.json", "--per_super_pod", "-o", "p"], "has no super pods"),
        (["split", "t.json", "--per_server", "-o", "t.json"], "cannot write t.json"),
        (["split", "t.json", "--per_server", "-o", "\0"], "cannot write"),
        (["digest", "t.json", "--check", "abc"], "is no sha256"),
        (["digest", "none.json"], "cannot read none.json"),
        (["diff", "t.json"], "Missing argument"),
    ],
)
def test_a_mistake_of_the_user_is_one_line(run, arguments, says):
    write("t.json", THREE)
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("ranktable: error: ")
    assert err.count("\n") == 1
    assert says in err
    assert not Path("p").exists()


@pytest.mark.parametrize("command", ["merge", "split", "select", "diff", "digest"])
def test_help_is_printed(run, command):
    status, out, err = run(command, "--help")
    assert (status, err) == (0, "")
    assert out.startswith(f"Usage: ranktable {command} ")
