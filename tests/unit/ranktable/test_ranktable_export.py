"""Tables as host files, commands and variables of other launchers: right in the grammar of each, and honest."""

import re
import shlex

import pytest
import yaml

from ranktable import BuildError, Device, RankTable, Server, SuperPod, build_table
from ranktable.export import export_names, export_table

TABLE = build_table([("node1", 2), ("node2", 3)])


def interleaved() -> RankTable:
    devices = {"a": (0, 3), "b": (1, 2)}
    servers = (Server(name, tuple(Device(i, rank) for i, rank in enumerate(ranks))) for name, ranks in devices.items())
    return RankTable("1.0", tuple(servers))


def text_of(to, table=TABLE, **options):
    export = export_table(table, to, **options)
    assert not export.is_folder
    return export.files[""]


def variables(text):
    return dict(line.split("=") for line in text.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize("to", ["deepspeed", "openmpi"])
def test_host_files_with_slots_are_what_deepspeed_parses(to):
    parsed = [re.fullmatch(r"(\S+)\s+slots=(\d+)", line) for line in text_of(to).splitlines()]
    assert [match.groups() for match in parsed] == [("node1", "2"), ("node2", "3")]


def test_mpich_and_horovod_have_counts_after_colons():
    assert text_of("mpich") == "node1:2\nnode2:3\n"
    assert text_of("horovod") == "node1:2,node2:3\n"


def test_slurm_is_told_what_its_host_list_cannot_say():
    numeric = build_table([("n9", 8), ("n10", 8)], order="given")
    assert export_table(numeric, "slurm").lost == ("the devices per server (give Slurm --nodes=2 --ntasks-per-node=8)",)
    strings = build_table([("n9", 8), ("n10", 8)])
    assert any("Slurm sorts the hosts itself" in what for what in export_table(strings, "slurm").lost)
    assert "--ntasks=5" in export_table(TABLE, "slurm").lost[0]


def test_a_slurm_host_file_has_the_host_of_each_rank():
    assert text_of("slurm-hostfile", interleaved()).split() == ["a", "b", "b", "a"]


def test_torchrun_commands_give_each_host_its_ranks():
    lines = text_of("torchrun", master_port=1234, command=("my train.py", "--lr=1")).splitlines()
    assert lines[::2] == ["# on node1: ranks 0-1", "# on node2: ranks 2-4"]
    for node_rank, (line, count) in enumerate(zip(lines[1::2], (2, 3), strict=True)):
        assert shlex.split(line) == [
            "torchrun",
            "--nnodes=2",
            f"--node-rank={node_rank}",
            f"--nproc-per-node={count}",
            "--master-addr=node1",
            "--master-port=1234",
            "my train.py",
            "--lr=1",
        ]


@pytest.mark.parametrize(
    ("target", "start"),
    [("ascend", "ASCEND_RT_VISIBLE_DEVICES=4,5 "), ("gpu", "CUDA_VISIBLE_DEVICES=4,5 "), ("cpu", "")],
)
def test_torchrun_keeps_device_ids_in_the_variable_of_the_target(target, start):
    table = build_table([("node1", [4, 5])])
    assert text_of("torchrun", table, device_target=target).splitlines()[1].startswith(f"{start}torchrun")


def test_each_rank_has_its_variables():
    export = export_table(interleaved(), "env-rank")
    assert list(export.files) == [f"rank_{rank}.env" for rank in range(4)]
    found = variables(export.files["rank_3.env"])
    assert found == {
        "MASTER_ADDR": "a",
        "MASTER_PORT": "29500",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "2",
        "RANK_ID": "3",
        "RANK_SIZE": "4",
        "DEVICE_ID": "1",
    }


def test_each_host_has_its_variables():
    export = export_table(build_table([("a", [1]), ("b", [0])]), "env")
    first = variables(export.files["node_0.env"])
    assert (first["PET_NODE_RANK"], first["PET_NNODES"], first["PET_NPROC_PER_NODE"]) == ("0", "2", "1")
    assert first["ASCEND_RT_VISIBLE_DEVICES"] == "1"
    assert "ASCEND_RT_VISIBLE_DEVICES" not in export.files["node_1.env"]


def test_accelerate_has_a_yaml_file_per_host_and_wants_equal_hosts():
    export = export_table(build_table([("a", 2), ("b", 2)]), "accelerate", device_target="gpu")
    second = yaml.safe_load(export.files["node_1.yaml"])
    assert (second["machine_rank"], second["num_processes"], second["main_process_ip"]) == (1, 4, "a")
    assert second["distributed_type"] == "MULTI_GPU"
    with pytest.raises(BuildError, match="equal numbers of devices"):
        export_table(TABLE, "accelerate")


def test_an_inventory_has_hosts_and_super_pods():
    servers = (Server("fe80::1", (Device(0, 0),)), Server("b", (Device(0, 1),), host_ip="10.0.0.2"))
    table = RankTable("1.2", servers, super_pods=(SuperPod("0", ("fe80::1",)), SuperPod("x-1", ("b",))))
    lines = text_of("ansible", table).splitlines()
    assert lines[1] == "node0 ansible_host=fe80::1 node_rank=0 num_devices=1 ranks=0 device_ids=0"
    assert lines[2] == "b ansible_host=10.0.0.2 node_rank=1 num_devices=1 ranks=1 device_ids=0"
    assert lines[4:6] == ["[super_pod_0]", "node0"]
    assert lines[7:9] == ["[super_pod_x_1]", "b"]
    doubled = RankTable("1.2", servers, super_pods=(SuperPod("x_1", ("fe80::1",)), SuperPod("x-1", ("b",))))
    with pytest.raises(BuildError, match="one group name"):
        export_table(doubled, "ansible")


def test_everything_that_is_left_out_is_listed():
    device = Device(3, 0, "10.0.0.9", "77", extra={"device_port": "16666"})
    server = Server("a", (device,), "10.0.0.1", "10.1.0.1", extra={"container_ip": "10.1.0.1"})
    table = RankTable("1.2", (server,), super_pods=(SuperPod("0", ("a",)),), extra={"hardware_type": "800I-A2"})
    assert export_table(table, "deepspeed").lost == (
        "device_id of the devices of 1 server",
        "device_ip of 1 device",
        "super_device_id of 1 device",
        "host_ip of 1 server",
        "pod_ip of 1 server",
        "super_pod_list (1 super pod)",
        "hardware_type of the table",
        "container_ip of 1 server",
        "device_port of 1 device",
    )
    by_host_ip = export_table(table, "deepspeed", address="host_ip")
    assert by_host_ip.files[""] == "10.0.0.1 slots=1\n"
    assert "host_ip of 1 server" not in by_host_ip.lost


@pytest.mark.parametrize("to", ["deepspeed", "openmpi", "mpich", "horovod", "slurm", "torchrun", "env", "accelerate"])
def test_other_ranks_than_host_by_host_are_refused_unless_renumbered(to):
    with pytest.raises(BuildError, match="give --renumber"):
        export_table(interleaved(), to)
    export = export_table(interleaved(), to, renumber=True)
    assert export.is_renumbered
    assert not export_table(TABLE, "deepspeed", renumber=True).is_renumbered


@pytest.mark.parametrize(
    ("table", "to", "says"),
    [
        (RankTable("1.0", ()), "env", "no devices"),
        (RankTable("1.0", (Server("a", (Device(0, 1),)),)), "env", "not 0 to 0"),
        (RankTable("1.0", (Server("my node", (Device(0, 0),)),)), "env", "no host name or address"),
        (build_table([("fe80::1", 1)]), "mpich", "IPv6 address fe80::1"),
        (build_table([("fe80::1", 1)]), "slurm", "IPv6 address fe80::1"),
        (TABLE, "pbs", "'pbs' is not known"),
        (RankTable("1.1", (Server("a", (Device(-1, 0),)),)), "torchrun", "rank 0 runs on its host"),
    ],
)
def test_what_a_format_cannot_say_is_refused(table, to, says):
    with pytest.raises(BuildError, match=says):
        export_table(table, to)


def test_version_2_0_has_no_host_names_which_is_said():
    table = RankTable("2.0", (Server("rack-0", (Device(0, 0),)),))
    assert "net_instance_ids" in export_table(table, "deepspeed").invented[0]
    assert export_table(TABLE, "deepspeed").invented == ()


def test_a_host_name_in_a_key_that_a_server_lacks_is_refused():
    with pytest.raises(BuildError, match="has no pod_ip; choose another --address"):
        export_table(TABLE, "env", address="pod_ip")


@pytest.mark.parametrize("to", export_names())
def test_every_format_names_every_host(to):
    text = export_table(build_table([(f"n{i:02d}", 2) for i in range(4)]), to).text
    if to == "slurm":
        assert text == "n[00-03]\n"
    else:
        assert all(f"n{i:02d}" in text for i in range(4))
