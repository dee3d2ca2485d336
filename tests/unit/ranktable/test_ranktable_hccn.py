"""Copies of hccn.conf and captured answers of hccn_tool and npu-smi."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import RankTableError, ReadError, SourceError
from ranktable.sources.captures import find_host_files, parse_hccn_conf, parse_transcript, read_answers

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

CAPTURE = """\
+ for i in 0 1
+ hccn_tool -i 0 -ip -g
ipaddr:192.168.100.101
netmask:255.255.255.0
+ hccn_tool -i 1 -ip -g
ipaddr:192.168.100.102
netmask:255.255.255.0
[root@node1 ~]# /usr/local/Ascend/driver/tools/hccn_tool -i 0 -link -g
link status: UP
+ npu-smi info -t spod-info -i 0 -c 0
        SDID                           : 102563840
        Super Pod Size                 : 384
        Super Pod ID                   : 3
+ npu-smi info -t spod-info -c 1 -i 0
        SDID                           : 102563841
        Super Pod ID                   : 3
"""


TWO_PODS = """\
npu-smi info -t spod-info -i 0 -c 0
SDID : 0
Super Pod ID : 0
npu-smi info -t spod-info -i 0 -c 1
SDID : 1
Super Pod ID : 1
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
        ("netmask_0=255.255.255.0\n", "it has no address_N line"),
        (
            "address_0=10.0.0.1\naddress_0=10.0.0.2\n",
            "a.conf:2: the device_ip of device 0 is 10.0.0.2 here, but 10.0.0.1 at a.conf:1",
        ),
        ("address_0=-.-.-.-\n", "a.conf:1: the address '-.-.-.-' of device 0 is the mark of a tool"),
        ("address_0=10.0.0.256\n", "is not an IPv4 or IPv6 address"),
        ("address_0=\n", "is not an IPv4 or IPv6 address"),
        ("address_0=10.0.0.1\nhello\n", "a.conf:2: 'hello' is not key=value"),
    ],
)
def test_a_faulty_hccn_conf_is_refused_with_its_line(text, says):
    with pytest.raises(SourceError) as caught:
        parse_hccn_conf(text.encode(), "a.conf")
    assert says in str(caught.value)


def test_a_transcript_gives_addresses_and_super_pods():
    answers = parse_transcript(CAPTURE.encode(), "a.txt")
    assert values(answers.addresses) == {0: "192.168.100.101", 1: "192.168.100.102"}
    assert values(answers.super_device_ids) == {0: "102563840", 1: "102563841"}
    assert answers.super_pod_id is not None
    assert (answers.super_pod_id.value, answers.super_pod_id.origin) == ("3", "a.txt:13")


def test_the_fabric_address_counts_where_no_other_was_asked_for():
    text = "hccn_tool -i 0 -vnic -g\nvnic ipaddr:10.1.0.1\nhccn_tool -i 1 -ip -inet6 -g\nipaddr:fe80::2/64\n"
    assert values(parse_transcript(text.encode(), "a").addresses) == {0: "10.1.0.1", 1: "fe80::2"}
    both = parse_transcript((text + "hccn_tool -i 0 -ip -g\nipaddr:10.0.0.1\n").encode(), "a")
    assert values(both.addresses) == {0: "10.0.0.1", 1: "fe80::2"}


@pytest.mark.parametrize("said", ["hccn_tool: the device is not ready: error 7", ""])
def test_what_a_tool_says_in_place_of_an_address_is_quoted_and_never_taken(said):
    answers = parse_transcript(f"+ hccn_tool -i 0 -ip -g\n+ hccn_tool -i 3 -ip -g\n{said}\n".encode(), "a.txt")
    assert answers.addresses == {}
    with pytest.raises(SourceError) as caught:
        answers.devices([3], "node1")
    assert "device 3 of 'node1' has no address" in str(caught.value)
    assert f"the answer is {said!r}" in str(caught.value)
    assert str(caught.value).startswith(f"a.txt:{3 if said else 2}: ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no captured hccn_tool or npu-smi command stands in it"),
        ("ipaddr:10.0.0.1\n", "a.txt:1: an address stands before any hccn_tool command"),
        ("bash: hccn_tool: command not found\n", "no captured hccn_tool"),
        ("hccn_tool -i 0 -ip -g\nipaddr:-.-.-.-\n", "a.txt:2: the address '-.-.-.-' of device 0"),
        (
            "hccn_tool -i 0 -ip -g\nipaddr:10.0.0.1\nhccn_tool -i 0 -ip -g\nipaddr:10.0.0.2\n",
            "here, but 10.0.0.1 at a.txt:2",
        ),
        ("npu-smi info -t spod-info\nSDID : 0\n", "without -i CARD and -c CHIP"),
        ("npu-smi info -t spod-info -i 0 -c 0\nSDID : 0\n", "the answer for device 0 has no Super Pod ID"),
        ("npu-smi info -t spod-info -i 0 -c 0\nSDID : 4294967296\nSuper Pod ID : 0\n", "no decimal number of 32 bits"),
        (TWO_PODS, "a.txt:6: the super pod id is 1 here, but 0 at a.txt:3"),
    ],
)
def test_a_faulty_transcript_is_refused_with_its_line(text, says):
    with pytest.raises(SourceError) as caught:
        parse_transcript(text.encode(), "a.txt")
    assert says in str(caught.value)
    assert caught.value.remedy


def test_sources_that_disagree_are_named_both():
    conf = parse_hccn_conf(b"address_0=10.0.0.1\n", "a.conf")
    tool = parse_transcript(b"hccn_tool -i 0 -ip -g\nipaddr:10.0.0.2\n", "a.txt")
    with pytest.raises(SourceError) as caught:
        conf.add(tool)
    message = "a.txt:2: the device_ip of device 0 is 10.0.0.2 here, but 10.0.0.1 at a.conf:1"
    assert str(caught.value).startswith(message)
    same = parse_transcript(
        b"hccn_tool -i 0 -ip -g\nipaddr:10.0.0.1\nhccn_tool -i 1 -ip -g\nipaddr:10.0.0.3\n", "a.txt"
    )
    conf.add(same)
    assert values(conf.addresses) == {0: "10.0.0.1", 1: "10.0.0.3"}


def test_a_folder_has_files_by_host(tmp_path):
    (tmp_path / "10.0.0.1.conf").write_text("address_0=192.168.1.1\n")
    (tmp_path / "10.0.0.1.txt").write_text("hccn_tool -i 1 -ip -g\nipaddr:192.168.1.2\n")
    (tmp_path / "node2").mkdir()
    (tmp_path / "node2" / "hccn.conf").write_text("address_5=192.168.2.5\n")
    (tmp_path / "README.md").write_text("no host")
    found = find_host_files(tmp_path)
    assert {name: [path.name for path in paths] for name, paths in found.items()} == {
        "10.0.0.1": ["10.0.0.1.conf", "10.0.0.1.txt"],
        "node2": ["hccn.conf"],
    }
    assert values(read_answers(*found["10.0.0.1"]).addresses) == {0: "192.168.1.1", 1: "192.168.1.2"}


def test_a_folder_without_hosts_is_refused(tmp_path):
    with pytest.raises(SourceError, match=r"no HOST\.conf"):
        find_host_files(tmp_path)
    with pytest.raises(ReadError, match="no such file"):
        find_host_files(tmp_path / "none")


LINES = st.sampled_from([*CONF.splitlines(), *CAPTURE.splitlines(), "ipaddr:", "SDID : x", "address_0=1", "=", "\x00"])


@settings(deadline=None, max_examples=80)
@given(
    st.lists(LINES, max_size=8).map("\n".join) | st.text(max_size=40),
    st.sampled_from([parse_hccn_conf, parse_transcript]),
)
def test_any_text_is_answers_or_an_error_in_words(text, parse):
    try:
        answers = parse(text.encode("utf-8", "surrogatepass"), "a")
        answers.devices(None, "a")
    except RankTableError as error:
        assert error.remedy
        assert "\n" not in str(error)
