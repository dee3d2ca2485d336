"""A keeper and those who come, over real sockets on loopback, each in a thread."""

import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_runner import wait_until

from msrun.errors import RendezvousTimeout, WorldError
from msrun.runtime.joining import meet as module
from msrun.runtime.joining.meet import SERVER, WORKER, Keeper, join, meet, serve
from msrun.runtime.joining.spec import Meeting, WorldSpec, keep_to_interface, listen_at

FOREVER_S = 60.0
SILENCE_S = 30


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def free_meeting(keeper="the scheduler", key="job"):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return Meeting(("127.0.0.1",), port, key, "MS_SCHED_HOST", keeper, may_be_foreign=True)


def come(meeting, size, rank=-1, limit_s=FOREVER_S, role=WORKER):
    return join(meeting, size, role, rank, f"test {rank}", limit_s, SILENCE_S)


@contextmanager
def keeping(workers, servers=0):
    meeting = free_meeting()
    with closing(Keeper(meeting, workers, servers, "scheduler", SILENCE_S)) as keeper:
        yield meeting, keeper


class Store(dict[str, str]):
    """A store of a keeper that nobody reaches."""

    set = dict.__setitem__


def keeper_of(came, workers, servers=0):
    """A keeper to whom these have come: key -> address."""
    keeper = object.__new__(Keeper)
    keeper._sizes, keeper._own, keeper._ranks = {WORKER: workers, SERVER: servers}, [], {}
    keeper._lines = dict.fromkeys(map(socket.SocketType, []), "") | dict(enumerate(came))
    keeper.store = Store({key: module.json.dumps(["pid 7 on vm", address, address]) for key, address in came.items()})
    return keeper


@settings(deadline=None)
@given(
    asked=st.lists(st.booleans(), min_size=1, max_size=8),
    addresses=st.lists(st.sampled_from(["10.0.0.9", "10.0.0.10", "fd00::1"]), min_size=8, max_size=8),
    seed=st.randoms(use_true_random=False),
)
def test_every_rank_is_given_once_and_who_asked_has_its_own(asked, addresses, seed):
    size = len(asked)
    ranks = list(range(size))
    seed.shuffle(ranks)
    keys = [f"worker/{ranks[number]}" if asked[number] else f"worker/+{number}" for number in range(size)]
    found = keeper_of(dict(zip(keys, addresses, strict=False)), size).assign()
    assert sorted(rank for rank, _, _ in found.values()) == list(range(size))
    assert all(found[key][0] == int(key[7:]) for key in keys if "+" not in key)
    for address in set(addresses[:size]):
        local = sorted(found[key] for key, own in zip(keys, addresses, strict=False) if own == address)
        assert [place for _, place, _ in local] == list(range(len(local)))
        assert {count for _, _, count in local} == {len(local)}
    given_out = [
        (ipaddress.ip_address(address).packed.rjust(16, b"\0"), found[key][0])
        for key, address in zip(keys, addresses, strict=False)
        if "+" in key
    ]
    assert sorted(given_out, key=lambda pair: pair[1]) == sorted(given_out)


@pytest.mark.parametrize(
    ("came", "text"),
    [
        ([], "0 of 7 registered, missing: 6 more workers and 1 more parameter server"),
        (["2", "0"], "2 of 7 registered, missing: ranks 1, 3-5 and 1 more parameter server; came: 10.0.0.9 with 1, "),
        (["0", "1", "2", "3", "4"], "missing: rank 5 and 1 more parameter server; came: 10.0.0.9 with 3, 10.0.0.10"),
        (["0", "+1", "2", "3", "4"], "5 of 7 registered, missing: 1 more worker and 1 more parameter server; came: "),
    ],
)
def test_missing_are_named_by_rank_where_ranks_are_known(came, text):
    keys = {f"worker/{word}": ["10.0.0.9", "10.0.0.10"][number % 2] for number, word in enumerate(came)}
    assert text in keeper_of(keys, 6, 1)._describe_missing()
    keys = {f"worker/{number}": f"10.0.0.{number + 1}" for number in range(10)}
    assert keeper_of(keys, 20)._describe_missing().endswith("10.0.0.8 with 1 and 2 more"), "many are counted"


def test_scheduler_gives_ranks_and_ends_when_all_have_left(threads, capfd):
    meeting = free_meeting()
    scheduler = threads.submit(serve, meeting, 3, FOREVER_S, SILENCE_S, 1)
    roles = [(-1, WORKER), (1, WORKER), (-1, WORKER), (-1, SERVER)]
    came = [threads.submit(come, meeting, 3, rank, role=role) for rank, role in roles]
    joined = [future.result(FOREVER_S) for future in came]
    assert sorted(one.rank for one in joined[:3]) == [0, 1, 2]
    assert (joined[1].rank, joined[1].local_rank, joined[1].local_world_size) == (1, 1, 3)
    assert joined[3].rank == 0
    assert len({one.token for one in joined}) == 1 and joined[0].token
    joined[0].store.set("greeting", "hello")
    assert joined[2].store.get("greeting") == b"hello"
    with pytest.raises(WorldError, match="has refused this process: an extra worker: all 3 have come"):
        come(meeting, 3)
    for one in joined[:3]:
        one.line.sendall(b"left\n")
        one.line.close()
    assert joined[3].line.recv(100) == b"over\n"
    joined[3].line.close()
    scheduler.result(FOREVER_S)
    told = capfd.readouterr().err
    assert f"msrun: scheduler at 127.0.0.1:{meeting.port}: waiting for 3 workers and 1 parameter servers\n" in told
    assert "refused 127.0.0.1: an extra worker" in told and "all workers have left" in told


def test_at_the_limit_both_sides_say_who_is_missing(threads):
    meeting = free_meeting()
    scheduler = threads.submit(serve, meeting, 2, 0.5, SILENCE_S)
    text = "MS_TOPO_TIMEOUT 0.5: 1 of 2 registered, missing: rank 1; came: 127.0.0.1 with 1"
    with pytest.raises(WorldError, match=f"the scheduler at 127.0.0.1:{meeting.port} ends the job: {text}"):
        come(meeting, 2, 0)
    with pytest.raises(RendezvousTimeout, match=text):
        scheduler.result(FOREVER_S)


def test_without_a_keeper_the_limit_ends_the_wait():
    meeting = free_meeting()
    text = rf"the scheduler was not at 127.0.0.1:{meeting.port} \(MS_SCHED_HOST\) within 0.2 s \(Connection refused\): "
    with pytest.raises(WorldError, match=text):
        come(meeting, 2, 0, limit_s=0.2)


def end_well(keeper, gathered, came):
    """All have come: they are answered, and leave."""
    assert gathered.result(FOREVER_S) == ""
    keeper.answer()
    for future in came:
        future.result(FOREVER_S).line.close()


def test_silent_strangers_make_room_for_those_who_belong(threads):
    with keeping(2) as (meeting, keeper), ExitStack() as held:
        gathered = threads.submit(keeper.gather, FOREVER_S)
        for number in range(3 * module._MAX_OF_ONE):
            stranger = held.enter_context(socket.create_connection(("127.0.0.1", meeting.port)))
            stranger.sendall(b"m" * (number % 2))  # one byte would hold torch's store up for all
        end_well(keeper, gathered, [threads.submit(come, meeting, 2, rank) for rank in range(2)])
        assert len(keeper._lines) <= module._MAX_OF_ONE + 2


def test_strangers_are_refused_and_told_and_the_others_come(threads, monkeypatch, capfd):
    """Who says of which job it is counts apart: no flood of strangers takes its note's place."""
    monkeypatch.setattr(module, "_MAX_NOTES", 10)
    with keeping(2) as (meeting, keeper):
        gathered = threads.submit(keeper.gather, FOREVER_S)
        noises = [b"GET / HTTP/1.1\r\n\r\n", b"msrun joins 1 job\n", b"\xff\x00\n", b"refused \x1b[2J\n"]
        for noise in [*noises, *[b"[]\n"] * module._MAX_NOTES, b"x" * (1 << 20) + b"\n"]:
            with socket.create_connection(("127.0.0.1", meeting.port)) as stranger:
                stranger.settimeout(FOREVER_S)
                try:
                    stranger.sendall(noise)
                    answer = stranger.recv(4096)
                except ConnectionError:  # it is closed with bytes unread
                    continue
                assert answer.startswith(b"refused "), noise[:20]
        own = "refused 127.0.0.1: it says that the world has 3 ranks, but here it has 2"
        first = threads.submit(come, meeting, 2, 0)
        wait_until(lambda: any(keeper._lines.values()), "the first has come")
        for asks, size, rank, text in (
            (meeting, 3, -1, "the world has 3 ranks, but here it has 2"),
            (meeting, 2, 2, "its rank is 2, but here ranks are 0 to 1"),
            (replace(meeting, key="other"), 2, -1, "it belongs to another job, which should have a port of its own"),
            (meeting, 2, 0, r"rank 0 is taken by rank 0 \(test 0, 127.0.0.1\)"),
        ):
            with pytest.raises(WorldError, match=text):
                come(asks, size, rank)
        end_well(keeper, gathered, [first, threads.submit(come, meeting, 2)])
    told = capfd.readouterr().err
    assert own in told and "rank 0 is taken by rank 0" in told and "belongs to another job" in told
    assert told.count("no process of msrun's runtime") == module._MAX_NOTES
    assert "\x1b" not in told


def test_one_that_has_come_and_gone_is_missing_again(threads, capfd):
    with keeping(2) as (meeting, keeper):
        gathered = threads.submit(keeper.gather, FOREVER_S)
        early = threads.submit(come, meeting, 2, 0, 1.0)
        wait_until(lambda: any(keeper._lines.values()), "the first has come")
        next(iter(keeper._lines)).shutdown(socket.SHUT_RDWR)
        end_well(keeper, gathered, [threads.submit(come_again, meeting, rank) for rank in range(2)])
        early.exception(FOREVER_S)
    assert "rank 0 (test 0, 127.0.0.1) has gone again" in capfd.readouterr().err


def come_again(meeting, rank):
    """Come as soon as the keeper has seen that the one before has gone."""
    while True:
        try:
            return come(meeting, 2, rank)
        except WorldError as error:
            assert "is taken by" in str(error)


@pytest.mark.parametrize("said", [b"", b"220 mail\r\n", b'{"store":', b"[]\n", b'{"store": 5}\n', b"x" * 5000 + b"\n"])
def test_another_program_at_the_place_is_named(threads, said):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        meeting = Meeting(("127.0.0.1",), listener.getsockname()[1], "job", "MASTER_ADDR")
        came = threads.submit(come, meeting, 2, 1)
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(said)
        with pytest.raises(WorldError, match=r"does not answer as one .*: another program listens there"):
            came.result(FOREVER_S)


def test_ranks_meet_at_rank_0_and_share_its_store(threads):
    meeting = free_meeting("rank 0")
    environs = [{}, {"GLOO_SOCKET_IFNAME": "mine"}]

    def join(rank):
        return meet(WorldSpec("rank table", rank, 2, rank, 2, "", meeting), meeting, environs[rank], FOREVER_S)

    second = threads.submit(join, 1)
    first = join(0)
    first.store.set("greeting", "hello")
    assert second.result(FOREVER_S).store.get("greeting") == b"hello"
    keep_to_interface(environs[0], "192.0.2.77")  # an unknown address changes nothing
    assert environs == [
        {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"},
        {"GLOO_SOCKET_IFNAME": "mine", "TP_SOCKET_IFNAME": "lo"},
    ]


@pytest.mark.parametrize(
    ("addresses", "words", "bound"),
    [
        (("127.0.0.1",), {}, "127.0.0.1"),
        (("localhost",), {}, "127.0.0.1"),
        (("::1",), {}, "::1"),
        (("127.0.0.1", "192.0.2.77"), {}, "0.0.0.0"),
        (("192.0.2.77",), {"may_be_foreign": True}, "0.0.0.0"),
        (("192.0.2.77",), {"named_by": "RANK_TABLE_FILE x"}, "rank 0 should be on the host 192.0.2.77 (RANK_TABLE"),
        (("no.such.invalid",), {"named_by": "MASTER_ADDR"}, "MASTER_ADDR: no.such.invalid cannot be resolved ("),
        (("myself",), {}, "0.0.0.0"),  # Debian's /etc/hosts gives the own name 127.0.1.1
    ],
)
def test_keeper_listens_on_its_address_alone_unless_there_is_a_doubt(addresses, words, bound, monkeypatch):
    meeting = replace(free_meeting(), addresses=addresses, **{"may_be_foreign": False, "keeper": "rank 0"} | words)
    if addresses == ("myself",):
        answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    try:
        with listen_at(meeting) as listener:
            assert listener.getsockname()[0] == bound
    except WorldError as error:
        if addresses == ("::1",):
            pytest.skip(f"no IPv6 here: {error}")
        assert bound in str(error) and " " in bound


@pytest.mark.parametrize(("keeper", "name"), [("the scheduler", "MS_SCHED_PORT"), ("rank 0", "MASTER_PORT")])
def test_port_in_use_is_named_with_the_variable_to_change(keeper, name):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(WorldError, match=f"{name} {port}: cannot listen on 127.0.0.1:{port} .* another {name}"):
            listen_at(Meeting(("127.0.0.1",), port, "job", "x", keeper))
