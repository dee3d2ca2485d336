"""What ssh -v writes to stderr, and what of it a user is shown."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.launch.transport.ssh import address_of, explain_end, shown, split_log

BEGIN = """\
OpenSSH_9.2p1 Debian-2+deb12u10, OpenSSL 3.0.19 27 Jan 2026
debug1: Connecting to 10.0.0.9 [10.0.0.9] port 22.
debug1: Connection established.
"""
SERVER = f"{BEGIN}debug1: Remote protocol version 2.0, remote software version OpenSSH_9.2p1\n"
KEY = f"{SERVER}debug1: Authenticating to 10.0.0.9:22 as 'me'\ndebug1: Server host key: ssh-ed25519 SHA256:abc\n"
OFFER = f"{KEY}debug1: Offering public key: /no/id ED25519 SHA256:def agent\n"
GOOD = f"{OFFER}debug1: Server accepts key: /no/id ED25519 SHA256:def\n"
JUMP = (
    "debug1: Executing proxy command: exec ssh -F /c -v -W '[10.0.0.7]:2222' gate\n"
    f"{SERVER}debug1: Authenticating to 10.0.0.9:22 as 'me'\n"
)
HUNG_UP = "kex_exchange_identification: Connection closed by remote host\r\nConnection closed by 10.0.0.9 port 22\r\n"
CHANGED = """\
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
Offending ECDSA key in /home/me/.ssh/known_hosts:2
  remove with:
  ssh-keygen -f "/home/me/.ssh/known_hosts" -R "10.0.0.9"
Host key for 10.0.0.9 has changed and you have requested strict checking.
Host key verification failed.
"""
UNKNOWN = "No ED25519 host key is known for 10.0.0.9 and you have requested strict checking.\n"
FAILED = "Host key verification failed.\n"
BAD = "Certificate invalid: name is not a listed principal\n"
PARTIAL = "Authenticated using x with partial success.\nme@h: Permission denied (keyboard-interactive)."
NO_WAY = "channel 0: open failed: connect failed: Connection refused\nstdio forwarding failed\n"


@pytest.mark.parametrize(
    ("log", "text"),
    [
        (f"{BEGIN}{HUNG_UP}", "the server has hung up before it said who it is: too many logins"),
        (f"{BEGIN}debug1: kex_exchange_identification: banner line 0: Exceeded MaxStartups\n{HUNG_UP}", "too many log"),
        (f"{SERVER}Connection reset by 10.0.0.9 port 22\n", "the server (OpenSSH_9.2p1) has hung up during the key ex"),
        (f"{BEGIN}debug1: kex_exchange_identification: banner line 0: HTTP\n{HUNG_UP}", "what answers there is no SSH"),
        (f"{BEGIN}ssh: connect to host 10.0.0.9 port 22: Connection refused\n", "connection refused: nothing listens"),
        (f"{BEGIN}ssh: connect to host h port 22: No route to host\n", "no route to the host; is it up"),
        (f"{BEGIN}ssh: connect to host h port 22: Network is unreachable\n", "its network is unreachable from here"),
        (f"{BEGIN}ssh: connect to host h port 22: Connection timed out\n", "does not answer; is the host up"),
        (f"{BEGIN}ssh: connect to host h port 22: Cannot assign\n", "cannot be connected to (Cannot assign)"),
        ("ssh: Could not resolve hostname gone: Name unknown\n", "the name gone cannot be resolved (Name unknown); gi"),
        (f"{KEY}{CHANGED}", "HOST KEY HAS CHANGED: it is ED25519 SHA256:abc, but /home/me/.ssh/known_hosts:2 has anot"),
        (f"{KEY}{CHANGED}", 'if that is so: ssh-keygen -f "/home/me/.ssh/known_hosts" -R "10.0.0.9"'),
        (f"{KEY}{UNKNOWN}{FAILED}", "host key ED25519 SHA256:abc is unknown: 10.0.0.9 is not in known_hosts; compare"),
        (f"{KEY}{FAILED}", "host key ED25519 SHA256:abc is unknown: the host is not in known_hosts; compare it"),
        (f"{KEY}{BAD}{UNKNOWN}{FAILED}", "is not in known_hosts and its certificate does not count: name is not a li"),
        (f"{KEY}The ED25519 host key for h is marked as revoked.\n{FAILED}", "SHA256:abc is revoked; give the host a"),
        (f"{KEY}Host key X revoked by file /r\n{FAILED}", "host key ED25519 SHA256:abc is revoked (/r); give the host"),
        (f"{OFFER}me@h: Permission denied (publickey).\n", "login as me refused: tried /no/id (in ssh-agent); the ser"),
        (f"{KEY}me@h: Permission denied (password).\n", "(give --ssh_identity FILE, or ssh-add one); the server takes"),
        (f"{GOOD}me@h: Permission denied (publickey).\n", "the server knows /no/id, but it cannot sign: has it a pass"),
        (f"{GOOD}{PARTIAL}", "beside a key the server wants keyboard-interactive, which msrun cannot give"),
        (f"{OFFER}{OFFER}Received disconnect from h: Too many authentication failures\n", "refused: tried /no/id"),
        (f"{OFFER}Connection closed by 10.0.0.9 port 22\n", "login as me refused: tried /no/id (in ssh-agent); the se"),
        (f"{SERVER}no matching cipher found. Their offer: a,b\n", "server and ssh have no cipher in common; the serve"),
        (f"{OFFER}exec request failed on channel 0\n", "the server starts no command; see ForceCommand"),
        (f"{OFFER}channel 0: open failed: administratively prohibited: x\n", "opens no session (administratively proh"),
        (f"{JUMP}{NO_WAY}{HUNG_UP}", "the jump host does not reach it (connect failed: Connection refused); is it up"),
        (f"{JUMP}me@h: Permission denied (publickey).\n{HUNG_UP}", "jump host 10.0.0.9: login as me refused: no key w"),
        (f"{JUMP}Authenticated to 10.0.0.9 ([10.0.0.9]:22) using x.\n{HUNG_UP}", "the server has hung up before it sa"),
        (f"{OFFER}Authenticated to h ([h]:22) using x.\n{HUNG_UP}", "the connection broke before the agent was starte"),
        (f"debug1: Executing proxy command: exec nc h\nnc: no\n{HUNG_UP}", "ProxyCommand nc h: nc: no"),
        ("a banner\nsomething new\n", "something new"),
        ("", "ssh has ended without a word"),
    ],
)
def test_reason_is_one_line_with_its_remedy(log, text):
    found = explain_end(log)
    assert text in found.text and "\n" not in found.text
    assert found.text.startswith("jump host 10.0.0.9: ") == ("jump host 10.0.0.9: " in text)


@pytest.mark.parametrize(
    ("log", "is_temporary"),
    [
        (f"{BEGIN}{HUNG_UP}", True),
        (f"{SERVER}{HUNG_UP}", True),
        (f"{OFFER}{HUNG_UP}", False),
        (f"{KEY}{FAILED}", False),
    ],
)
def test_another_try_helps_only_where_a_server_was_busy(log, is_temporary):
    assert explain_end(log).is_temporary is is_temporary


@pytest.mark.parametrize(
    ("log", "text"),
    [
        ("debug1: Reading configuration data /c\n", "its name is not resolved in time; is the name server well?"),
        (BEGIN.partition("debug1: Connection est")[0], "does not answer within 1.5 s; is the host up, and does a fire"),
        (BEGIN, "no login within 1.5 s: the host or its sshd hangs, or is slow; log in with ssh -v"),
        ("debug1: Executing proxy command: exec nc h\n", "no login within 1.5 s"),
    ],
)
def test_delay_is_explained_by_how_far_it_came(log, text):
    found = explain_end(log, 1.5)
    assert found.is_late and text in found.text


def test_place_is_what_was_to_be_reached():
    assert [explain_end(log).place for log in (BEGIN, JUMP, "")] == ["10.0.0.9", "10.0.0.7 port 2222", ""]
    assert explain_end(BEGIN.replace("port 22", "port 23")).place == "10.0.0.9 port 23"


def test_address_is_that_of_the_last_login():
    direct = 'Authenticated to h ([::ffff:10.0.0.9]:22) using "publickey".\r\n'
    assert (address_of(direct), address_of(f"{direct}Authenticated to h (via proxy) using x.\n")) == ("10.0.0.9", "")
    assert (address_of('Authenticated to h ([fe80::1%eth0]:22) using "x".'), address_of("")) == ("fe80::1", "")


def test_what_the_host_wrote_is_told_from_what_ssh_wrote():
    log = (
        f"{OFFER}Traceback:\nTransferred: sent 3472, received 3296 bytes, in 0.0 seconds\r\nMemoryError\ndebug1: Exit\n"
    )
    assert split_log(log)[1] == "Traceback:\nMemoryError"


def test_path_in_the_home_directory_is_shown_with_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert [shown(Path(path)) for path in ("/home/me/.ssh/id", "/opt/id")] == ["~/.ssh/id", "/opt/id"]


LINES = "".join((GOOD, JUMP, HUNG_UP, CHANGED, UNKNOWN, FAILED, BAD, PARTIAL, NO_WAY)).splitlines()


@given(st.lists(st.sampled_from(LINES) | st.text(max_size=40)).map("\n".join), st.sampled_from([None, 1.5]))
def test_any_log_is_explained_in_one_line(log, late_s):
    fault = explain_end(log, late_s)
    assert fault.text and "\n" not in fault.text + fault.place + address_of(log)
