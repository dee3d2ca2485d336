"""This host: its files below a root folder, its tools as real small programs, and a table held against it."""

import ipaddress
import json
import os
import select
import socket
import textwrap
from pathlib import Path

import pytest
import yaml
from file_tree import grow
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import RankTableError, build_table, local_host, write_table
from ranktable.cli import main
from ranktable.errors import BuildError, HostListError
from ranktable.generate import HostInventory
from ranktable.local_host import (
    LocalHost,
    ask_addresses,
    ask_super_pod,
    find_tool,
    parse_hccn_conf,
    probe_host,
    read_local_host,
)
from ranktable.model import Device

ADDRESSES = tuple(map(ipaddress.ip_address, ("10.0.0.5", "172.17.0.1", "fd00::2")))
NODE = LocalHost("node1", ADDRESSES, ADDRESSES[0])


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The files of a host with two Ascend devices and three addresses."""
    monkeypatch.setattr(local_host, "read_local_host", lambda: NODE)
    devices = dict.fromkeys(("dev/davinci0", "dev/davinci1", "dev/davinci_manager"), "")
    addresses = "address_1=192.168.2.5\naddress_0=192.168.1.5\naddress_7=192.168.8.5\n"
    return grow(tmp_path / "root", {**devices, "etc/hccn.conf": addresses})


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Put small programs, and no other, on PATH; return the function that writes one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def write(name, body):
        path = folder / name
        path.write_text("#!/bin/sh\n" + textwrap.dedent(body))
        path.chmod(0o755)
        return path

    return write


GOOD_HCCN = """\
if [ "$3" = "-ip" ] && [ "$4" = "-g" ]; then echo "ipaddr:192.168.$(($2 + 1)).5"; echo "netmask:255.255.255.0"; fi
"""
GOOD_SMI = """\
echo "        SDID                           : $(($5 * 262144 + $7 * 65536 + $5 * 2 + $7))"
echo "        Super Pod ID                   : 3"
"""


def test_this_host_has_a_name_and_its_main_address_is_one_of_its_own():
    host = read_local_host()
    assert host.name == socket.gethostname()
    assert host.main_address in (None, *host.addresses)
    assert not any(address.is_loopback or address.is_link_local for address in host.addresses)


def test_a_probe_asks_the_tools(root, tool):
    tool("hccn_tool", GOOD_HCCN)
    tool("npu-smi", GOOD_SMI)
    host, target, notes = probe_host(root, asks_super_pod=True)
    assert host == HostInventory(
        "10.0.0.5",
        (Device(0, -1, "192.168.1.5", "0"), Device(1, -1, "192.168.2.5", "65537")),
        "10.0.0.5",
        super_pod_id="3",
    )
    assert target == "ascend"
    assert "asked this host: ascend, 2 devices" in notes


def test_a_tool_where_the_driver_installs_it_is_found(root, tool):
    path = tool("hccn_tool", GOOD_HCCN)
    home = root / "usr/local/Ascend/driver/tools/hccn_tool"
    home.parent.mkdir(parents=True)
    path.rename(home)
    assert find_tool("hccn_tool", root) == str(home)
    assert find_tool("npu-smi", root) is None


def test_a_probe_names_a_stale_hccn_conf(root, tool):
    tool("hccn_tool", 'echo "ipaddr:192.168.1.$(($2 + 5))"')
    with pytest.raises(HostListError) as caught:
        probe_host(root)
    assert "etc/hccn.conf:1: the device_ip of device 1 is 192.168.2.5 here, but 192.168.1.6" in str(caught.value)
    assert "hccn_tool -i 1 -ip -g" in str(caught.value)


def test_a_probe_asks_for_ipv6_where_there_is_no_ipv4(root, tool):
    (root / "etc/hccn.conf").unlink()
    tool(
        "hccn_tool", 'if [ "$4" = "-inet6" ]; then echo "ipaddr:fd01::$2/64"; else echo "no ip is set" >&2; exit 1; fi'
    )
    assert [device.device_ip for device in probe_host(root)[0].devices] == ["fd01::0", "fd01::1"]


def test_devices_without_addresses_are_probed_as_such_in_the_words_of_the_tool(root, tool):
    (root / "etc/hccn.conf").unlink()
    tool("hccn_tool", 'echo "hccn_tool: ip is not set"; exit 1')
    host, _, notes = probe_host(root)
    assert [device.device_ip for device in host.devices] == [None, None]
    assert "no device_ip is known: hccn_tool says 'hccn_tool: ip is not set'" in notes


def test_one_device_without_an_address_among_others_is_an_error(root, tool):
    (root / "etc/hccn.conf").write_text("address_0=192.168.1.5\n")
    with pytest.raises(HostListError, match="it has no address for device 1, but for 1 others"):
        probe_host(root)
    tool("hccn_tool", 'if [ "$2" = 0 ]; then echo "ipaddr:192.168.1.5"; fi')
    with pytest.raises(HostListError, match="device 1 has no address: the answer is ''"):
        probe_host(root)


def test_a_tool_that_does_not_answer_is_ended_with_all_that_it_started(root, tool, monkeypatch):
    monkeypatch.setattr(local_host, "TIME_LIMIT_S", 0.2)
    tool("hccn_tool", "/bin/sleep 600 & echo $! >> $0.pids; wait")
    with pytest.raises(HostListError, match=r"hccn_tool -i 0 -ip -g: there is no answer within 0\.2 s"):
        ask_addresses([0], root)
    started = root.parent / "bin/hccn_tool.pids"
    for pid in started.read_text().split() if started.exists() else ():
        assert has_ended(int(pid))


def has_ended(pid):
    """Wait until the process has ended, which the kernel reports on a descriptor of it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 30)[0])
    finally:
        os.close(descriptor)


def test_a_tool_that_cannot_be_started_is_an_error(root, tool):
    tool("hccn_tool", "").write_text("#!/no/such/interpreter\n")
    with pytest.raises(HostListError, match="cannot be started: no such file"):
        ask_addresses([0], root)


@pytest.mark.parametrize(
    ("target", "ids", "says"),
    [
        ("ascend", [5], "device 5 is not on this host, which has 0, 1"),
        ("gpu", None, "there is no /dev/nvidiaN below"),
        ("cpu", None, "the number of its processes is not known; give --devices"),
    ],
)
def test_what_a_host_does_not_have_is_not_made_up(root, tool, target, ids, says):
    with pytest.raises(BuildError) as caught:
        probe_host(root, target, ids)
    assert says in str(caught.value)


def test_a_host_with_both_kinds_of_devices_asks_which(root, tool):
    (root / "dev/nvidia0").touch()
    with pytest.raises(BuildError, match="has Ascend devices and GPUs; choose with --device_target"):
        probe_host(root)
    assert [device.device_id for device in probe_host(root, "gpu")[0].devices] == [0]


@pytest.fixture
def check(root, tool, capsys, tmp_path, monkeypatch):
    """Write a table, hold it against the host of `root`; return exit status, findings and the text."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK_TABLE_FILE", "RANK_ID", "RANK_SIZE", "DEVICE_ID"):
        monkeypatch.delenv(name, raising=False)

    def call(table, *options, name="t.json"):
        write_table(name, table)
        status = main(["validate", "--local", name, "--root", str(root), "--format", "json", *options])
        (report,) = json.loads(capsys.readouterr().out)
        found = [(problem["rule"], problem["severity"], problem["path"]) for problem in report["problems"]]
        return status, found, " ".join(problem["message"] for problem in report["problems"])

    return call


def table_of(case):
    """Return the table of a case: servers with device ids, addresses by a pattern, SDIDs in order."""
    pattern, sdids = case.get("ips", "192.168.{}.5"), iter(case.get("sdids", ()))
    hosts = [
        HostInventory(
            server_id,
            tuple(
                Device(number, -1, pattern and pattern.format(number + 1 + 50 * place), next(sdids, None))
                for number in ids
            ),
            super_pod_id="3" if "sdids" in case else None,
        )
        for place, (server_id, ids) in enumerate(case["table"].items())
    ]
    return build_table(hosts, version="1.2" if "sdids" in case else "1.0", device_target=target_of(case))


def target_of(case):
    options = case.get("options", ())
    return options[1] if "--device_target" in options else "ascend"


CASES = yaml.load((Path(__file__).parent / "local_cases.yaml").read_text(), yaml.CSafeLoader)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_table_is_held_against_this_host(check, root, tool, monkeypatch, case):
    for path in case.get("gone", ()):
        (root / path).unlink()
    for path in case.get("made", ()):
        (root / path).touch()
    for name, body in case.get("tools", {}).items():
        tool(name, body)
    for name, value in case.get("set", {}).items():
        monkeypatch.setenv(name, value)
    Path("link.json").symlink_to("t.json")
    status, found, message = check(table_of(case), *case.get("options", ("--chip", "a2")))
    assert [" ".join(finding).rstrip() for finding in found] == case.get("found", [])
    assert status == int(any(" error" in finding for finding in case.get("found", ())))
    assert case.get("says", "") in message
    if found and not status:
        assert check(table_of(case), *case.get("options", ("--chip", "a2")), "--strict")[0] == 1


def test_a_variable_that_names_no_file_is_an_error_with_what_follows_from_it(capsys, monkeypatch):
    monkeypatch.setenv("RANK_TABLE_FILE", "none.json")
    assert main(["validate", "--local"]) == 2
    err = capsys.readouterr().err
    assert "cannot read none.json: no such file or directory; correct RANK_TABLE_FILE: torch_npu goes on without" in err


def test_every_table_of_the_catalogue_is_checked_or_refused_in_words(root, tool, capsys):
    tables = sorted((Path(__file__).parent / "catalogue").rglob("*.json"))
    assert tables
    for table in tables:
        status = main(["validate", "--local", str(table), "--root", str(root)])
        captured = capsys.readouterr()
        assert status in (0, 1, 2, 3), table
        assert captured.err.startswith("ranktable: error: ") if status == 2 else captured.out, table


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('echo "SDID : 0"; echo "Super Pod ID : $7"', "-c 1: the super pod id is 1 here, but 0 at npu-smi info"),
        ('echo "SDID : 0"', "the answer for device 0 has no Super Pod ID"),
        ('echo "SDID : x"; echo "Super Pod ID : 0"', "SDID 'x' is no decimal number of 32 bits"),
    ],
)
def test_answers_of_npu_smi_that_cannot_be_taken_are_refused(root, tool, body, says):
    tool("npu-smi", body)
    with pytest.raises(HostListError) as caught:
        ask_super_pod([0, 1], root)
    assert says in str(caught.value)


def test_what_npu_smi_does_not_tell_is_said(root, tool):
    assert ask_super_pod([0], root) is None
    tool(
        "npu-smi",
        'if [ "$7" = 0 ]; then echo "This device does not support querying spod-info."; else\n' + GOOD_SMI + "fi",
    )
    answers = ask_super_pod([0, 1], root)
    assert answers is not None
    assert {number: said.value for number, said in answers.super_device_ids.items()} == {1: "65537"}


def test_the_choice_of_an_address_is_said(root, tool, monkeypatch):
    notes = probe_host(root)[2]
    assert "server_id is 10.0.0.5, one of 3 addresses; choose with --server_id" in notes
    assert len(probe_host(root, server_id="a")[2]) == 1
    monkeypatch.setattr(local_host, "read_local_host", lambda: LocalHost("node1", ()))
    assert probe_host(root)[0].server_id == "node1"


def test_a_rank_of_another_host_is_answered_with_the_ranks_of_this_one(check, monkeypatch, capsys):
    monkeypatch.setenv("RANK_ID", "3")
    check(table_of({"table": {"10.0.0.5": [0, 1], "10.0.0.6": [0, 1]}}))
    main(["validate", "--local", "t.json", "--root", "root", "--chip", "a2"])
    captured = capsys.readouterr()
    assert "remedy: take one of 0 to 1" in captured.out
    assert captured.err == "ranktable: this host is server 10.0.0.5 of the table, with ranks 0 to 1\n"


def test_a_table_without_ranks_is_held_against_those_that_its_readers_count(check, root, monkeypatch, capsys):
    devices = [{"device_id": str(number), "device_ip": f"192.168.{number + 1}.5"} for number in range(2)]
    pod = {"pod_name": "p", "server_id": "10.0.0.5", "devices": devices}
    group = {"group_name": "g", "instance_count": "1", "device_count": "2", "instance_list": [pod]}
    Path("t.json").write_text(json.dumps({"status": "completed", "group_count": "1", "group_list": [group]}))
    monkeypatch.setenv("RANK_ID", "1")
    assert main(["validate", "--local", "t.json", "--root", str(root)]) == 0
    captured = capsys.readouterr()
    assert " L7 " not in captured.out
    assert captured.err == "ranktable: this host is server 10.0.0.5 of the table, with ranks 0 to 1\n"


CONF = """\
# written by the installer
netmask_0=255.255.255.0
address_7=192.168.1.107
address_0 = 192.168.1.100
gateway_0=192.168.1.1
netdetect_0=192.168.1.2

xsfp_reset_time_0=1
address_10=192.168.1.110
"""


def values(said):
    return {device_id: answer.value for device_id, answer in said.items()}


def test_addresses_of_hccn_conf_are_read_in_any_order_and_with_gaps():
    answers = parse_hccn_conf(CONF.encode(), "a.conf")
    assert values(answers.addresses) == {0: "192.168.1.100", 7: "192.168.1.107", 10: "192.168.1.110"}
    assert answers.addresses[7].origin == "a.conf:3"


def test_ipv6_addresses_count_where_there_is_no_ipv4():
    answers = parse_hccn_conf(
        b"address_0=fe80::1/64\nIPv6address_0=fe80::1\naddress_1=10.0.0.1\naddress_1=10.0.0.1\n", "a"
    )
    assert values(answers.addresses) == {0: "fe80::1", 1: "10.0.0.1"}
    answers = parse_hccn_conf(b"address_0=10.0.0.1\nipv6address_0=fe80::1\n", "a")
    assert values(answers.addresses) == {0: "10.0.0.1"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a.conf: it has no address_N line"),
        (
            "address_0=10.0.0.1\naddress_0=10.0.0.2\n",
            "a.conf:2: the device_ip of device 0 is 10.0.0.2 here, but 10.0.0.1 at a.conf:1",
        ),
        ("address_0=-.-.-.-\n", "a.conf:1: the address '-.-.-.-' of device 0 is the mark of a tool"),
        ("address_0=10.0.0.1\nhello\n", "a.conf:2: 'hello' is not key=value"),
    ],
)
def test_a_faulty_hccn_conf_is_refused_with_its_line(text, says):
    with pytest.raises(HostListError) as caught:
        parse_hccn_conf(text.encode(), "a.conf")
    assert says in str(caught.value)


LINES = st.sampled_from([*CONF.splitlines(), "ipaddr:", "SDID : x", "address_0=1", "=", "\x00"])


@settings(deadline=None, max_examples=80)
@given(st.lists(LINES, max_size=8).map("\n".join) | st.text(max_size=40))
def test_any_text_is_answers_or_an_error_in_words(text):
    try:
        parse_hccn_conf(text.encode("utf-8", "surrogatepass"), "a")
    except RankTableError as error:
        assert error.remedy
        assert "\n" not in str(error)
