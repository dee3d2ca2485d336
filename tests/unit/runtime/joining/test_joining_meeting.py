"""A keeper and those who come, over real sockets on loopback, each in a thread."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest
from job_runner import wait_until

from msrun.errors import ClusterError, RendezvousTimeout, WorldError
from msrun.runtime.joining.meet import Met, Registration, meet, register, serve
from msrun.runtime.joining.network import MAX_BYTES, LineStream, keep_to_interface, listen_at
from msrun.runtime.joining.registrar import (
    MAX_NOTED,
    MAX_NOTES_OF_ONE,
    MAX_STRANGERS_OF_ONE,
    Registrar,
    Registry,
    Request,
    Seat,
)
from msrun.runtime.joining.spec import Meeting, WorldSpec

FOREVER_S = 60.0
SILENCE_S = 30


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def free_meeting(keeper: str = "the scheduler") -> Meeting:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return Meeting(("127.0.0.1",), port, "job", "MS_SCHED_HOST", keeper, may_be_foreign=True)


def come(meeting: Meeting, size: int, rank: int = -1, limit_s: float = FOREVER_S) -> Registration:
    return register(meeting, Request("job", size, rank, f"test {rank}"), limit_s, SILENCE_S)


@contextmanager
def gathering(size: int) -> Iterator[tuple[Meeting, Registrar]]:
    meeting = free_meeting()
    registrar = Registrar(listen_at(meeting), Registry("job", size), "scheduler", SILENCE_S)
    with closing(registrar):
        yield meeting, registrar


def test_scheduler_gives_ranks_and_ends_when_all_have_left(
    threads: ThreadPoolExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    meeting = free_meeting()
    scheduler = threads.submit(serve, meeting, 3, FOREVER_S, SILENCE_S)
    came = [threads.submit(come, meeting, 3, rank) for rank in (-1, 1, -1)]
    registrations = [future.result(FOREVER_S) for future in came]
    assert registrations[1].seat == Seat(1, 1, 3)
    assert sorted(registration.seat.global_rank for registration in registrations) == [0, 1, 2]
    with pytest.raises(WorldError, match="has refused this process: an extra worker: all 3 have come"):
        come(meeting, 3)
    for registration in registrations:
        assert registration.stream.send({"left": True})
        registration.stream.close()
    scheduler.result(FOREVER_S)
    told = capfd.readouterr().err
    assert f"msrun: scheduler at 127.0.0.1:{meeting.port}: waiting for 3 workers\n" in told
    assert "refused 127.0.0.1: an extra worker" in told and "all workers have left" in told


def test_worker_that_ends_without_leaving_ends_the_others(threads: ThreadPoolExecutor) -> None:
    meeting = free_meeting()
    scheduler = threads.submit(serve, meeting, 2, FOREVER_S, SILENCE_S)
    came = [threads.submit(come, meeting, 2, rank) for rank in range(2)]
    first, second = (future.result(FOREVER_S) for future in came)
    second.stream.close()
    (message,) = first.stream.receive() or []
    assert message["failed"].startswith("rank 1 (test 1, 127.0.0.1) ended without release(): it failed, or")
    assert first.stream.receive() is None
    first.stream.close()
    with pytest.raises(ClusterError, match=r"rank 1 .* ended without release"):
        scheduler.result(FOREVER_S)


def test_at_the_limit_both_sides_say_who_is_missing(threads: ThreadPoolExecutor) -> None:
    meeting = free_meeting()
    scheduler = threads.submit(serve, meeting, 2, 0.5, SILENCE_S)
    text = "MS_TOPO_TIMEOUT 0.5: 1 of 2 registered, missing: rank 1; came: 127.0.0.1 with 1"
    with pytest.raises(WorldError, match=f"the scheduler at 127.0.0.1:{meeting.port} ends the job: {text}"):
        come(meeting, 2, 0)
    with pytest.raises(RendezvousTimeout, match=text):
        scheduler.result(FOREVER_S)


def test_without_a_keeper_the_limit_ends_the_wait() -> None:
    meeting = free_meeting()
    text = rf"the scheduler was not at 127.0.0.1:{meeting.port} \(MS_SCHED_HOST\) within 0.2 s \(Connection refused\): "
    with pytest.raises(WorldError, match=text):
        come(meeting, 2, 0, limit_s=0.2)


def test_silent_strangers_make_room_for_those_who_belong(threads: ThreadPoolExecutor) -> None:
    with gathering(2) as (meeting, registrar), ExitStack() as held:
        gathered = threads.submit(registrar.gather, FOREVER_S)
        for _ in range(3 * MAX_STRANGERS_OF_ONE):
            held.enter_context(socket.create_connection(("127.0.0.1", meeting.port)))
        came = [threads.submit(come, meeting, 2, rank) for rank in range(2)]
        assert gathered.result(FOREVER_S) == ""
        assert len(registrar._strangers) <= MAX_STRANGERS_OF_ONE
        registrar.answer(1)
        for future in came:
            future.result(FOREVER_S).stream.close()


def test_strangers_are_refused_and_the_others_come(
    threads: ThreadPoolExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    with gathering(2) as (meeting, registrar):
        gathered = threads.submit(registrar.gather, FOREVER_S)
        nested = [b'{"protocol":' + b"[" * depth + b"]" * depth + b"}\n" for depth in range(970, 1000, 3)]
        unprintable = b'{"protocol":1,"key":"job","name":"\\u001b[2J","world_size":2,"global_rank":0}\n'
        http = b"GET / HTTP/1.1\r\n\r\n"
        for noise in (http, b"[]\n", b'{"protocol":7}\n', b"x" * (MAX_BYTES + 70_000), unprintable, *nested):
            with socket.create_connection(("127.0.0.1", meeting.port)) as stranger:
                stranger.settimeout(FOREVER_S)
                try:
                    stranger.sendall(noise)
                    answer = stranger.recv(4096)
                except ConnectionError:  # it is closed with bytes unread
                    continue
                assert b'{"refused":' in answer
        with pytest.raises(WorldError, match="the world has 3 ranks, but here it has 2"):
            come(meeting, 3)
        came = [threads.submit(come, meeting, 2, rank) for rank in range(2)]
        assert gathered.result(FOREVER_S) == ""
        registrar.answer(1)
        for future in came:
            future.result(FOREVER_S).stream.close()
    told = capfd.readouterr().err
    for reason in (
        "no message of JSON",
        "a JSON list",
        "of another version (protocol 7)",
        f"more than {MAX_BYTES} bytes",
    ):
        assert reason in told


def test_refusal_of_an_own_process_is_told_after_a_flood_of_strangers(
    threads: ThreadPoolExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    """From its own address and from many others: an address of a stranger has its limit, and takes nobody's place."""
    with gathering(1) as (meeting, registrar):
        gathered = threads.submit(registrar.gather, FOREVER_S)
        for number in range(MAX_NOTED + MAX_NOTES_OF_ONE + 5):
            source = f"127.0.1.{number + 1}" if number < MAX_NOTED else "127.0.0.1"
            with socket.create_connection(("127.0.0.1", meeting.port), source_address=(source, 0)) as stranger:
                stranger.settimeout(FOREVER_S)
                stranger.sendall(b"[]\n")
                assert b"refused" in stranger.recv(4096)
        with pytest.raises(WorldError, match="the world has 3 ranks, but here it has 1"):
            come(meeting, 3)
        own = threads.submit(come, meeting, 1)
        assert gathered.result(FOREVER_S) == ""
        registrar.answer(1)
        own.result(FOREVER_S).stream.close()
    told = capfd.readouterr().err
    assert "refused 127.0.0.1: it says that the world has 3 ranks, but here it has 1" in told
    assert told.count("a JSON list") == MAX_NOTED, "one of each address, and no more addresses"


def test_one_that_has_come_and_gone_is_missing_again(
    threads: ThreadPoolExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    with gathering(2) as (meeting, registrar):
        gathered = threads.submit(registrar.gather, FOREVER_S)
        with socket.create_connection(("127.0.0.1", meeting.port)) as gone:
            LineStream(gone).send(Request("job", 2, 0, "early").to_json())
            wait_until(lambda: registrar._members, "the first has come")
        wait_until(lambda: not registrar._members, "it has gone")
        came = [threads.submit(come, meeting, 2, rank) for rank in range(2)]
        assert gathered.result(FOREVER_S) == ""
        registrar.answer(1)
        for future in came:
            future.result(FOREVER_S).stream.close()
    assert "rank 0 (early, 127.0.0.1) has gone again" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("said", "text"), [(b"", "has closed the connection"), (b"220 mail\r\n", "no message of JSON")]
)
def test_another_program_at_the_place_is_named(threads: ThreadPoolExecutor, said: bytes, text: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        meeting = Meeting(("127.0.0.1",), listener.getsockname()[1], "job", "MASTER_ADDR")
        came = threads.submit(come, meeting, 2, 1)
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(said)
        with pytest.raises(WorldError, match=f"{text}.*another program listens there"):
            came.result(FOREVER_S)


def test_ranks_meet_at_rank_0_and_share_its_store(threads: ThreadPoolExecutor) -> None:
    meeting = free_meeting("rank 0")
    environs: list[dict[str, str]] = [{}, {"GLOO_SOCKET_IFNAME": "mine"}]

    def join(rank: int) -> Met:
        return meet(WorldSpec("rank table", rank, 2, rank, 2, "", meeting), meeting, environs[rank], FOREVER_S)

    second = threads.submit(join, 1)
    first = join(0)
    first.store.set("greeting", "hello")
    assert second.result(FOREVER_S).store.get("greeting") == b"hello"
    assert environs == [
        {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"},
        {"GLOO_SOCKET_IFNAME": "mine", "TP_SOCKET_IFNAME": "lo"},
    ]


def test_rank_0_names_those_who_have_not_come() -> None:
    meeting = free_meeting("rank 0")
    with pytest.raises(
        WorldError, match=r"rank 0 at .* \(MS_SCHED_HOST\): after 1 s 1 of 3 registered, missing: ranks 1-2"
    ):
        meet(WorldSpec("rank table", 0, 3, 0, 3, "", meeting), meeting, {"MS_TOPO_TIMEOUT": "1"}, FOREVER_S)


@pytest.mark.parametrize(
    ("meeting", "text"),
    [
        (
            Meeting(("192.0.2.77",), 8118, "", "RANK_TABLE_FILE x"),
            "rank 0 should be on the host 192.0.2.77 (RANK_TABLE",
        ),
        (Meeting(("no.such.invalid",), 8118, "", "MASTER_ADDR"), "MASTER_ADDR: no.such.invalid cannot be resolved ("),
    ],
)
def test_keeper_that_is_not_where_it_should_be_says_so(meeting: Meeting, text: str) -> None:
    with pytest.raises(WorldError) as caught:
        listen_at(meeting)
    assert text in str(caught.value)


def test_port_in_use_is_named_with_the_variable_to_change() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for keeper, name in (("the scheduler", "MS_SCHED_PORT"), ("rank 0", "MASTER_PORT")):
            meeting = Meeting(("127.0.0.1",), port, "job", "x", keeper)
            with pytest.raises(WorldError, match=f"{name} {port}: cannot listen on 127.0.0.1:{port} .* another {name}"):
                listen_at(meeting)


@pytest.mark.parametrize(
    ("addresses", "may_be_foreign", "bound"),
    [
        (("127.0.0.1",), False, "127.0.0.1"),
        (("localhost",), False, "127.0.0.1"),
        (("::1",), False, "::1"),
        (("127.0.0.1", "192.0.2.77"), False, "0.0.0.0"),
        (("192.0.2.77",), True, "0.0.0.0"),
    ],
)
def test_keeper_listens_on_its_address_alone_unless_there_is_a_doubt(
    addresses: tuple[str, ...], may_be_foreign: bool, bound: str
) -> None:
    meeting = Meeting(addresses, free_meeting().port, "job", "x", may_be_foreign=may_be_foreign)
    try:
        with listen_at(meeting) as listener:
            assert listener.getsockname()[0] == bound
    except WorldError as error:
        if addresses == ("::1",):
            pytest.skip(f"no IPv6 here: {error}")
        raise


def test_own_name_that_is_loopback_here_is_no_address_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts gives the own name 127.0.1.1."""
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    with listen_at(Meeting(("myself",), free_meeting().port, "job", "MASTER_ADDR")) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_unknown_address_leaves_the_interface_open() -> None:
    environ: dict[str, str] = {}
    keep_to_interface(environ, "192.0.2.77")
    assert environ == {}
