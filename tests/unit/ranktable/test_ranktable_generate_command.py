"""`ranktable generate` from every source of hosts: what is written, what is said, what is refused."""

import io
import json
import sys
from pathlib import Path

import pytest

from ranktable.cli import main

HCCN = "address_0=192.168.{0}.1\naddress_1=192.168.{0}.2\n"


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


def write_conf(*names):
    Path("conf").mkdir(exist_ok=True)
    for place, name in enumerate(names, 1):
        Path(f"conf/{name}.conf").write_text(HCCN.format(place))


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


def test_a_slurm_job_gives_its_hosts(run, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[09-10]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "1(x2)")
    _, out, _ = run("--slurm")
    assert devices_of(out) == [("n09", 0, None, 0), ("n10", 0, None, 1)]
    assert "n09" in run("--slurm", "--devices", "3")[1]
    assert "has 1 devices, --devices lists 2" in run("--slurm", "--devices", "3,4")[2]


def test_copies_of_hccn_conf_give_hosts_devices_and_addresses(run):
    write_conf("10.0.0.2", "10.0.0.10")
    status, out, err = run("--hccn_conf", "conf", "--chip", "a2")
    assert status == 0
    assert devices_of(out) == [
        ("10.0.0.10", 0, "192.168.2.1", 0),
        ("10.0.0.10", 1, "192.168.2.2", 1),
        ("10.0.0.2", 0, "192.168.1.1", 2),
        ("10.0.0.2", 1, "192.168.1.2", 3),
    ]
    assert "ranks follow the string order of the server ids; rank 0 is on 10.0.0.10" in err


def test_a_list_of_hosts_chooses_among_the_copies(run):
    write_conf("a", "b", "c")
    _, out, err = run("--hosts", "a:2,b", "--hccn_conf", "conf", "--devices", "0-1")
    assert [device[0] for device in devices_of(out)] == ["a", "a", "b", "b"]
    assert "conf: 1 hosts that are not asked for are left out" in err
    _, out, _ = run("--hosts", "a,b", "--hccn_conf", "conf", "--devices", "1")
    assert devices_of(out) == [("a", 1, "192.168.1.2", 0), ("b", 1, "192.168.2.2", 1)]


def test_one_file_speaks_for_one_host(run):
    Path("hccn.conf").write_text(HCCN.format(1))
    assert devices_of(run("--hosts", "a", "--hccn_conf", "hccn.conf")[1]) == [
        ("a", 0, "192.168.1.1", 0),
        ("a", 1, "192.168.1.2", 1),
    ]
    assert "it can speak for one host only" in run("--hosts", "a,b", "--hccn_conf", "hccn.conf")[2]


def spod(sdid):
    return "".join(
        f"npu-smi info -t spod-info -i 0 -c {chip}\nSDID : {sdid + 65537 * chip}\nSuper Pod ID : 4\n" for chip in (0, 1)
    )


def test_captures_give_super_pods(run):
    write_conf("a", "b")
    Path("conf/a.txt").write_text(spod(0))
    Path("conf/b.txt").write_text(spod(2**22))
    status, out, err = run("--hccn_conf", "conf", "--version", "1.2", "--chip", "a3", "-o", "t.json")
    assert (status, out) == (0, "")
    assert "wrote t.json: 2 servers, 4 devices" in err
    table = json.loads(Path("t.json").read_text())
    assert table["super_pod_list"] == [{"super_pod_id": "4", "server_list": [{"server_id": "a"}, {"server_id": "b"}]}]
    assert [device["super_device_id"] for device in table["server_list"][1]["device"]] == ["4194304", "4259841"]
    assert run("--chip", "a3", "--strict", "t.json", command="validate")[0] == 0
    _, out, err = run("--hccn_conf", "conf")
    assert "super pods and 4 super_device_ids are left out: --version 1.2 keeps them" in err
    assert "super" not in out


def test_a_super_pod_needs_no_device_addresses(run):
    Path("conf").mkdir()
    Path("conf/a.txt").write_text(spod(0))
    Path("conf/b.txt").write_text(spod(2**22))
    status, out, _ = run("--hccn_conf", "conf", "--version", "1.2", "--chip", "a3")
    assert status == 0
    assert [device[2] for device in devices_of(out)] == [None] * 4
    assert run("--hccn_conf", "conf", "--version", "1.2", "--chip", "a3", "--devices", "0-2")[0] == 2


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


def test_pods_give_hosts_in_the_order_of_their_rank_index(run):
    def value(server):
        return json.dumps(
            {"server_id": server, "devices": [{"device_id": "0", "device_ip": f"192.168.0.{server[-1]}"}]}
        )

    def pod(server, index):
        marks = {"ascend.kubectl.kubernetes.io/ascend-910-configuration": value(server)}
        return {"metadata": {"name": server, "annotations": {**marks, **index}}}

    Path("pods.json").write_text(
        json.dumps({"items": [pod("10.0.0.1", {"hccl/rankIndex": "1"}), pod("10.0.0.2", {"hccl/rankIndex": "0"})]})
    )
    status, out, err = run("--pod_annotations", "pods.json")
    assert status == 0
    assert [device[0] for device in devices_of(out)] == ["10.0.0.2", "10.0.0.1"]
    assert "ranks follow hccl/rankIndex; rank 0 is on 10.0.0.2" in err
    assert "warning: Ascend readers demand --order server_id" in err
    _, out, _ = run("--pod_annotations", "pods.json", "--order", "server_id")
    assert [device[0] for device in devices_of(out)] == ["10.0.0.1", "10.0.0.2"]
    Path("pods.json").write_text(json.dumps([pod("10.0.0.1", {}), pod("10.0.0.2", {})]))
    assert "the 2 hosts have no hccl/rankIndex; their order is a guess" in run("--pod_annotations", "pods.json")[2]


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
        (["--hosts", "a:1", "--slurm"], "--hosts and --slurm both name the hosts"),
        (["--slurm"], "SLURM_JOB_NODELIST: the variable is not set"),
        (["--hosts", "a:1", "--hccn_conf", "conf", "--device_ips", "10.0.0.{device+1}"], "both give the addresses"),
        (["--probe", "--hccn_conf", "conf"], "--probe and --hccn_conf both give the addresses"),
        (["--pod_annotations", "x", "--devices", "0"], "--devices does not go with --pod_annotations"),
        (["--hosts", "z", "--hccn_conf", "conf"], "host 'z' (--hosts) has no z.conf"),
        (["--hosts", "a:8", "--hccn_conf", "conf"], "conf/a.conf: it has 2 devices of 'a', --hosts says 8"),
        (["--hosts", "a", "--hccn_conf", "conf", "--devices", "0-2"], "no address of device 2 of 'a'"),
        (["--hccn_conf", "conf", "--version", "1.2"], "no super pod of the servers is known"),
        (["--hosts", "a:1", "--super_pods", "0=a"], "super pods are part of version 1.2"),
        (["--hosts", "a:1", "--version", "1.2", "--super_pods", "a"], "'a' has no id before its hosts"),
        (["--hosts", "a:1", "--version", "1.2", "--super_pods", "0=a;0=b"], "super pod '0' is given twice"),
        (["--hosts", "a:1", "--version", "1.2", "--super_pods", "0=a:8"], "'a' has slots or a user here"),
        (["--hosts", "a:1", "--version", "1.2", "--super_pods", "0=a["], "has a [ without its other half"),
        (["--hosts", "a:1", "--root", "x"], "--root and --server_id go with --probe"),
        (["--hosts", "a:1", "--device_target", "gpu", "--chip", "a2"], "does not go with device_target 'gpu'"),
        (["--hosts", "a:1", "--order", "rank_index"], "has no rank index"),
        (["--hosts", "a:1,b:1", "--chip", "a2"], "(R16 for a2"),
        (["--hosts", "a:2", "--include", "a:7"], "a has no device 7; its devices are 0-1"),
        (["--hostfile", "none"], "cannot read none"),
    ],
)
def test_a_mistake_is_one_line(run, arguments, says):
    write_conf("a")
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("ranktable: error: ")
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [x]", "device 0 of server 'a': super_device_id = \"x\": the id is no decimal"),
        ("a: [1, 2]", "server 'a' has 1 device and 2 super device ids"),
        ("b: [1]", "super device ids are given for 'b', which is not one of the servers"),
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
