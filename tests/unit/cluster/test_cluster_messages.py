"""Messages arrive whole, once and in order, whatever the stream; of what form they must be; threads that carry them."""

import os
import selectors
import socket

import pytest
from failure_reports import failure_of
from hypothesis import given
from hypothesis import strategies as st

from msrun.cluster import connection
from msrun.cluster import messages as own_thread
from msrun.cluster import protocol as forms
from msrun.cluster.connection import (
    MAX_GREETING_BYTES,
    Connection,
    Greeting,
    Seal,
    hello,
    new_nonce,
    read_hello,
    token_of_servers,
)
from msrun.cluster.failure import FailureReport
from msrun.cluster.host_report import ReachResult
from msrun.cluster.messages import (
    HEADER,
    MAX_MESSAGE_BYTES,
    Channel,
    FrameBuffer,
    Inbox,
    OwnThread,
    describe_fault,
    encode_message,
    print_fault,
    traceback_of,
)
from msrun.cluster.protocol import check_said, protocol, read_moment
from msrun.planning.record import encode_record

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters())
objects = st.dictionaries(
    st.text(max_size=5), st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=6), max_size=4
)


@given(st.lists(objects, max_size=5), st.data())
def test_messages_survive_any_cut_of_the_stream(messages, data):
    stream = b"".join(encode_message(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    buffer = FrameBuffer()
    received = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += buffer.messages(stream[begin:end])
    assert received == messages


DEEP = b'{"a":' * 40 + b"1" + b"}" * 40


@pytest.mark.parametrize("body", [b"[]", b"1", b"null", b'"text"', b"{", b"", b"\xff", b"[" * 100_000, DEEP])
def test_body_that_is_no_object_is_refused(body):
    with pytest.raises(ValueError):
        FrameBuffer().messages(HEADER.pack(len(body)) + body)


def test_length_beyond_the_limit_is_not_sent_and_refused_before_it_is_read():
    with pytest.raises(ValueError, match="at most"):
        encode_message({"text": "x" * MAX_MESSAGE_BYTES})
    with pytest.raises(ValueError, match="at most"):
        FrameBuffer().messages(HEADER.pack(MAX_MESSAGE_BYTES + 1))
    longest = encode_message({"text": "x" * (MAX_MESSAGE_BYTES - len('{"text":""}'))})
    assert FrameBuffer().messages(longest[: HEADER.size]) == [] and len(longest) == HEADER.size + MAX_MESSAGE_BYTES


@given(st.binary(max_size=64))
def test_any_bytes_give_messages_or_a_value_error(data):
    try:
        messages = FrameBuffer().messages(data)
    except ValueError:
        return
    assert all(isinstance(message, dict) for message in messages)


@pytest.fixture
def ends():
    left, right = socket.socketpair()
    yield Channel(left), Channel(right)
    left.close()
    right.close()


def test_channel_sees_the_other_end_go(ends):
    left, right = ends
    right.send({"last": True})
    right.close()
    assert left.receive() == [{"last": True}]
    assert not left.is_closed
    assert left.receive() == []
    assert left.is_closed
    assert left.send({"n": 1}) is False


TOKEN = b"a token of this job"


def test_parameter_servers_of_each_job_have_a_token_of_their_own():
    tokens = {token_of_servers(*words) for words in (("a", "job"), ("a", "another"), ("b", "job"), ("a", "job"))}
    assert len(tokens) == 3 and {len(token) for token in tokens} == {64}


@pytest.fixture
def sides():
    """The scheduler's end and a host's, which have greeted each other."""
    scheduler, host = map(Connection, socket.socketpair())
    ours, greeting = new_nonce(), Greeting(host, TOKEN, is_scheduler=False)
    assert [read_hello(body) for body in scheduler.receive()] == [(protocol(), greeting.nonce)]
    assert greeting.open(hello(ours)) is None
    scheduler.seal = Seal(TOKEN, ours, greeting.nonce, is_scheduler=True)
    yield scheduler, host
    scheduler.close()
    host.close()


def test_what_follows_the_word_that_lets_a_host_in_is_read_by_whoever_reads_next(sides):
    scheduler, host = sides
    long = b"x" * (2 * MAX_GREETING_BYTES)
    for body in (b"accepted", long, b"called off"):
        scheduler.send_body(body)
    (first,) = host.receive()
    assert host.unseal(first) == b"accepted"
    host.trust()
    assert [host.unseal(body) for body in host.receive()] == [long, b"called off"]
    scheduler.send_plain(bytes(99))
    assert host.read() == b"" and host.stderr_text().startswith("a message without the proof")


def test_what_was_said_before_the_other_side_went_is_read_after_a_send_has_failed(sides):
    scheduler, host = sides
    scheduler.send_body(b"called off")
    scheduler.close()
    host.send_body(b"a log")
    host.send_body(b"a log")
    assert (scheduler.is_closed, host.is_closed, host.has_unsent) == (True, False, False)
    assert [host.unseal(body) for body in host.receive()] == [b"called off"]
    assert (host.receive(), host.is_closed) == ([], True)


def test_record_that_is_held_up_is_given_again_until_it_is_sent_whole(sides, monkeypatch):
    scheduler, host = sides
    host.trust()
    piece = os.urandom(connection.RECORD_BYTES)
    while (sent := scheduler.write(piece)) == len(piece):
        pass
    assert sent == 0
    while not (sent := scheduler.write(piece)):
        assert all(host.unseal(body) == piece for body in host.receive())
    assert sent == len(piece)
    monkeypatch.setattr(connection, "MAX_UNSENT_BYTES", len(piece))
    with pytest.raises(BrokenPipeError):
        for _ in range(1 << 10):
            scheduler.send_body(piece)
            scheduler.write(piece)


REPORT = encode_record(FailureReport(failure_of(0)))
FAIL = {"status": "fail", "name": "x", "text": "y"}
SAID = {
    "checked": {"report": {"findings": [{**FAIL, "exit_code": code} for code in (1, 255)]}},
    "listening": {"port": 1, "error": ""},
    "reached": {"result": encode_record(ReachResult())},
    "event": {"moment": "note", "fields": {"text": "x"}},
    "failed": {"attempt": 0, "report": REPORT},
    "ended": {"attempt": 0, "can_continue": True, "come": [1], "has_begun": True, "report": None},
    "done": {"attempt": 0, "rank": 1, "has_come": True},
    "ready": {"attempt": 1, "clock_s": 1.5},
    "log": {"name": "worker_0.log", "attempt": None, "data": ""},
    "logs_end": {},
    "result": {"failure": None, "survivors": [4711]},
    "error": {"text": "no", "exit_code": 3},
    "fault": {"text": "no", "traceback": ""},
}


@pytest.mark.parametrize("kind", SAID)
def test_what_an_agent_says_is_taken_and_nothing_may_be_missing(kind):
    check_said({"type": kind, "seq": 7, **SAID[kind]})
    for name in SAID[kind].keys() - {"error"}:
        with pytest.raises(ValueError, match=name):
            check_said({"type": kind, **{key: value for key, value in SAID[kind].items() if key != name}})


@pytest.mark.parametrize(
    ("kind", "changes", "where"),
    [
        ("lost", {"reason": "x"}, "lost"),
        ("failed", {"report": {"failure": 7}}, r"\$\.report\.failure"),
        ("failed", {"attempt": True}, r"\$\.attempt"),
        ("result", {"survivors": ["1"]}, r"\$\.survivors"),
        ("ended", {"come": [1 << 50]}, r"\$\.come"),
        ("ready", {"clock_s": float("inf")}, r"\$\.clock_s"),
        ("checked", {"report": {"addresses": [{"address": "x", "interface": "", "prefix_bits": 0}]}}, r"\$\.report"),
        ("checked", {"report": {"findings": [{**FAIL, "exit_code": 0}]}}, "exit code 0"),
        ("checked", {"report": {"findings": [{**FAIL, "exit_code": 256}]}}, "exit code 256"),
    ],
)
def test_what_is_of_another_form_is_refused_by_its_field(kind, changes, where):
    with pytest.raises(ValueError, match=where):
        check_said({"type": kind, **SAID.get(kind, {}), **changes})


def test_fields_that_do_not_belong_to_a_moment_are_left_out():
    assert read_moment("note", {"text": "x", "more": 1}) == {"text": "x"}
    with pytest.raises(ValueError, match="started: pid"):
        read_moment("started", {"global_rank": 0, "pid": "7"})


@pytest.mark.parametrize("table", ["SAID", "TOLD", "MOMENTS"])
def test_version_changes_with_a_form(monkeypatch, table):
    before = protocol()
    assert protocol() == before
    protocol.cache_clear()
    monkeypatch.setattr(forms, table, {**getattr(forms, table), "new": {"text": str}})
    assert protocol() != before
    protocol.cache_clear()


def test_owner_is_told_what_a_thread_raises():
    told = list[BaseException]()

    def work():
        raise SystemExit(3)

    thread = OwnThread("test", work, told.append)
    thread.start()
    thread.join(60)
    assert [type(error) for error in told] == [SystemExit] and thread.fault is told[0]


def test_thread_that_goes_on_works_again_and_tells_the_first_fault_alone(monkeypatch):
    monkeypatch.setattr(own_thread, "PAUSE_S", 0.0)
    told, faults = list[str](), [OSError("first"), OSError("second")]

    def work():
        if faults:
            raise faults.pop(0)

    thread = OwnThread("test", work, lambda error: told.append(str(error)), goes_on=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and told == ["first"] and not faults


def test_fault_is_one_line_under_the_name_of_msrun_and_its_traceback_can_be_printed(capsys):
    error = OSError(5, "Input/output\nerror")
    error.add_note("while it read worker_0.log")
    assert describe_fault(error) == (
        "msrun itself failed: OSError: [Errno 5] Input/output error, while it read worker_0.log; its traceback is in "
        "scheduler.log"
    )
    assert describe_fault(KeyError()) == "msrun itself failed: KeyError; its traceback is in scheduler.log"
    print_fault(error)
    assert capsys.readouterr().err == traceback_of(error)


@pytest.fixture
def inbox():
    found = Inbox()
    yield found
    found.close()


def test_reader_is_woken_as_long_as_there_are_messages(inbox):
    with selectors.DefaultSelector() as selector:
        selector.register(inbox, selectors.EVENT_READ)
        for _ in range(2):
            assert not selector.select(0)
            for _ in range(2):
                inbox.post({})
            assert selector.select(0) and selector.select(0)
            assert len(inbox.take(1)) == 1 and selector.select(0) and len(inbox.take()) == 1
