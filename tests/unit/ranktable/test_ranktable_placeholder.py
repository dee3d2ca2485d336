"""What stands for a value left out is named; what a host may be called is not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable.values import name_placeholder

MASK, TOOL = "a mask", "the mark of a tool that could not read the value"
PLACEHOLDER, RANGE, ELISION = "a placeholder", "a range that was not expanded", "an elision"
NAMED = {
    MASK: "10.*.*.* 172.16.**.** 192.168.x.x 192.168.1.xxx XX.XX.XX.XX x.x.x.98 xxx.xxx.xxx.xxx xx xx.xx x:x:x:x "
    "10.0.0.? ??? 10.0.0.N 192_168_x_x",
    TOOL: "-.-.-.- - -- -.-",
    ELISION: "... 10.0... \u2026 10.0.0.1\u2026",
    RANGE: "192.168.1.[1-8] node[0-3] node[0,1]",
    PLACEHOLDER: "<ip> <IP_ADDRESS> [device_ip_0] [ip] ${IP} $IP $(IP) {ip} {{.IP}} %IP% @IP@ __IP__ (null) dev<id> "
    "N/A None null todo TBD FIXME your-ip your_server_ip my_ip server_ip host_ip device_ip pod_ip ip_address ip_1 "
    "device_ip_7 server_id ip unknown undefined change_me changeme replace-me",
}


@pytest.mark.parametrize(("text", "name"), [(text, name) for name, texts in NAMED.items() for text in texts.split()])
def test_what_stands_for_a_value_is_named(text, name):
    assert name_placeholder(text) == name


HARMLESS = (
    "10.0.0.1 255.255.255.255 fe80::1 2001:db8::9 dead:beef::1 [::1] x x86 x86-64 node-xx xx-host xxl xxl.example.com "
    "xx.com host.x.com node-x.example.com ip-10-0-0-1 ip-10-0-0-1.ec2.internal node_0 server_1 localhost none-such "
    "todo-server yourbank-01 a.b.c.d na"
)


@pytest.mark.parametrize("text", [*HARMLESS.split(), "", "<" * 300])
def test_addresses_and_names_of_hosts_are_left_alone(text):
    assert name_placeholder(text) is None


@settings(deadline=None)
@given(st.ip_addresses())
def test_no_address_is_a_placeholder(address):
    assert name_placeholder(str(address)) is None


WORDS = {"todo", "tbd", "fixme", "none", "null", "ip", "unknown", "undefined", "changeme", "replaceme"}


@settings(deadline=None)
@given(st.from_regex(r"[a-wyz][a-z0-9-]{0,20}[a-z0-9](\.[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?){0,3}", fullmatch=True))
def test_no_name_that_dns_allows_is_a_placeholder(name):
    is_word = name in WORDS or name.startswith(("your-", "change-", "replace-"))
    assert is_word or name_placeholder(name) is None
    assert is_word or name_placeholder(name.upper()) is None
