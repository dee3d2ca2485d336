"""`ranktable generate` from every source of hosts: what is written, what is said, what is refused."""

import io
import json
import sys
from pathlib import Path

import pytest

from ranktable.cli import main


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Run the command in an empty folder, without tools; return exit status, the table written and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def call(*arguments, command="generate"):
        words = [str(argument) for argument in arguments]
        status = main([command, *words, *(["-o", "-"] if command == "generate" and "-o" not in words else [])])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def devices_of(out):
    """Return (server id, device id, device ip, rank) of the printed table."""
    return [
        (server["server_id"], int(device["device_id"]), device.get("device_ip"), int(device["rank_id"]))
        for server in json.loads(out)["server_list"]
        for device in server["device"]
    ]


def test_a_host_file_gives_hosts_and_slots(run, monkeypatch):
    Path("hosts").write_text("b slots=2\na slots=1\n")
    status, out, _ = run("--hostfile", "hosts")
    assert status == 0
    assert devices_of(out) == [("a", 0, None, 0), ("b", 0, None, 1), ("b", 1, None, 2)]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a slots=1\na slots=1\n")))
    status, out, _ = run("--hostfile", "-", "--hostfile_format", "openmpi")
    assert [device[1] for device in devices_of(out)] == [0, 1]


def test_hosts_are_filtered_and_keep_the_addresses_of_the_whole_list(run):
    options = ("--hosts", "a:2,b:2,c:2", "--device_ips", "10.1.{server}.{device+1}")
    _, out, _ = run(*options, "--include", "b:1@c")
    assert devices_of(out) == [("b", 1, "10.1.1.2", 0), ("c", 0, "10.1.2.1", 1), ("c", 1, "10.1.2.2", 2)]
    _, out, _ = run(*options, "--exclude", "a@b:1@c:0")
    assert devices_of(out) == [("b", 0, "10.1.1.1", 0), ("c", 1, "10.1.2.2", 1)]


def test_super_pods_are_given_by_hand(run):
    Path("sdids.yaml").write_text("a: [0]\nb: ['65537']\n")
    options = ("--version", "1.2", "--super_device_ids", "sdids.yaml")
    _, out, _ = run("--hosts", "a:1,b:1", *options, "--super_pods", "0=a;1=b")
    table = json.loads(out)
    assert [pod["super_pod_id"] for pod in table["super_pod_list"]] == ["0", "1"]
    assert [server["device"][0]["super_device_id"] for server in table["server_list"]] == ["0", "65537"]
    assert run("--hosts", "a:1,b:1", *options, "--super_pods", "0=a", "--super_pods", "1=b")[1] == out
    _, out, _ = run("--hosts", "a:1,b:1", *options, "--super_pods", "0=b", "--exclude", "a")
    assert [server["server_id"] for server in json.loads(out)["server_list"]] == ["b"]


def test_this_host_is_probed_below_a_root(run):
    for path, text in {
        "host/dev/davinci3": "",
        "host/etc/hccn.conf": "address_3=192.168.1.3\naddress_0=192.168.1.1\n",
    }.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    status, out, err = run("--probe", "--root", "host", "--server_id", "node7")
    assert status == 0
    assert devices_of(out) == [("node7", 3, "192.168.1.3", 0)]
    assert "asked this host: ascend, 1 device" in err
    Path("host/dev/davinci3").unlink()
    _, out, err = run("--probe", "--root", "host", "--devices", "0-1", "--server_id", "node7")
    assert devices_of(out) == [("node7", 0, None, 0), ("node7", 1, None, 1)]
    assert "asked this host: cpu, 2 devices" in err


def test_host_ip_is_written_for_targets_without_device_ip(run):
    _, out, _ = run("--hosts", "10.0.0.1:1,node2:1", "--device_target", "GPU")
    assert [server.get("host_ip") for server in json.loads(out)["server_list"]] == ["10.0.0.1", None]


def test_force_replaces_the_default_file(run, capsys):
    Path("rank_table_1pcs.json").write_text("old")
    assert main(["generate", "--hosts", "a:1"]) == 2
    assert "name it with -o to replace it, or give --force" in capsys.readouterr().err
    assert main(["generate", "--hosts", "a:1", "--force"]) == 0
    assert json.loads(Path("rank_table_1pcs.json").read_text())["server_count"] == "1"
    assert Path("rank_table_1pcs.json").stat().st_mode & 0o777 == 0o644


def test_what_only_ascend_would_refuse_is_said_when_no_target_is_named(run):
    status, _, err = run("--hosts", "a:40")
    assert status == 0
    assert "error on Ascend: R8 server_list[0].device[32].device_id" in err
    assert run("--hosts", "a:40", "--device_target", "cpu")[2] == ""
    assert run("--hosts", "a:40", "--device_target", "ascend")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--probe", "--device_ips", "x"], "--probe and --device_ips both give the addresses"),
        (["--probe", "--hosts", "a:1"], "--hosts and --probe both name the hosts"),
        ([], "no source of hosts is named"),
        (["--hosts", "a:1", "--version", "1.2"], "no super pod of the servers is known"),
        (["--hosts", "a:1", "--super_pods", "0=a"], "super pods are part of version 1.2"),
        (["--hosts", "a:1", "--version", "1.2", "--super_pods", "a"], "'a' has no id before its hosts"),
        (["--hosts", "a:1", "--version", "1.2", "--super_pods", "0=a;0=b"], "super pod '0' is given twice"),
        (["--hosts", "a:1", "--version", "1.2", "--super_pods", "0=a:8"], "'a' has slots or a user here"),
        (["--hosts", "a:1", "--version", "1.2", "--super_pods", "0=a["], "has a [ without its other half"),
        (["--hosts", "a:1", "--root", "x"], "--root and --server_id go with --probe"),
        (["--hosts", "a:1", "--device_target", "gpu", "--chip", "a2"], "does not go with device_target 'gpu'"),
        (["--hosts", "a:1,b:1", "--chip", "a2"], "(R16 for a2"),
        (["--hosts", "a:2", "--include", "a:7"], "a has no device 7; its devices are 0-1"),
        (["--hostfile", "none"], "cannot read none"),
    ],
)
def test_a_mistake_is_one_line(run, arguments, says):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("ranktable: error: ")
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [x]", 'server_list[0].device[0].super_device_id = "x": the id is no decimal'),
        ("a: [1, 2]", "server 'a' has 1 device, but 2 super device ids for them"),
        ("b: [1]", "a super device id is given for 'b', which is not one of the servers"),
        ("[]", "SDIDs"),
    ],
)
def test_numbers_of_devices_that_do_not_fit_are_refused(run, text, says):
    Path("sdids.yaml").write_text(text)
    status, _, err = run(
        "--hosts", "a:1", "--version", "1.2", "--super_device_ids", "sdids.yaml", "--super_pods", "0=a"
    )
    assert status == 2
    assert says in err
