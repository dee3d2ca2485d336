"""/etc/hccn.conf, and what hccn_tool and npu-smi say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import RankTableError
from ranktable.errors import HostListError
from ranktable.local_host import Said, parse_hccn_conf

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
    with pytest.raises(HostListError) as caught:
        parse_hccn_conf(text.encode(), "a.conf")
    assert says in str(caught.value)


def test_sources_that_disagree_are_named_both():
    conf = parse_hccn_conf(b"address_0=10.0.0.1\n", "a.conf")
    with pytest.raises(HostListError, match=r"the device_ip of device 0 is 10\.0\.0\.2 here, but 10\.0\.0\.1 at a"):
        conf.add_address(0, Said("10.0.0.2", "hccn_tool"))
    conf.add_address(1, Said("10.0.0.3", "hccn_tool"))
    assert values(conf.addresses) == {0: "10.0.0.1", 1: "10.0.0.3"}


LINES = st.sampled_from([*CONF.splitlines(), "ipaddr:", "SDID : x", "address_0=1", "=", "\x00"])


@settings(deadline=None, max_examples=80)
@given(st.lists(LINES, max_size=8).map("\n".join) | st.text(max_size=40))
def test_any_text_is_answers_or_an_error_in_words(text):
    try:
        parse_hccn_conf(text.encode("utf-8", "surrogatepass"), "a")
    except RankTableError as error:
        assert error.remedy
        assert "\n" not in str(error)
