"""Tables for property tests: any placement of ranks, with and without addresses, super pods, further keys."""

from hypothesis import strategies as st

from ranktable import Device, RankTable, Server, SuperPod

SERVER_IDS = st.sampled_from([*(f"10.0.0.{number}" for number in (1, 2, 9, 10, 11)), "node9", "node10", "a", "b"])
EXTRAS = st.dictionaries(
    st.sampled_from(["hardware_type", "note", "zz"]),
    st.sampled_from(["x", "y", 1, True, 1.0, [1, {"k": None}]]),
    max_size=2,
)


@st.composite
def tables(draw, dialect="1.0", scattered=True, max_servers=5):
    """Return a table of distinct servers, device ids, addresses and ranks 0 to n-1.

    With `scattered` the ranks stand anywhere; without, they follow the list.
    """
    server_ids = draw(st.lists(SERVER_IDS, min_size=1, max_size=max_servers, unique=True))
    device_ids = [draw(st.lists(st.integers(0, 15), min_size=1, max_size=4, unique=True)) for _ in server_ids]
    size = sum(map(len, device_ids))
    ranks = iter(draw(st.permutations(range(size))) if scattered else range(size))
    has_ips = draw(st.booleans())
    has_pods = dialect == "1.2"
    number = iter(range(1, size + 1))
    servers = tuple(
        Server(
            server_id,
            tuple(
                Device(
                    device_id,
                    next(ranks),
                    f"192.168.1.{place}" if has_ips else None,
                    str(place) if has_pods else None,
                    draw(EXTRAS),
                )
                for device_id, place in zip(ids, number, strict=False)
            ),
            draw(st.none() | st.just("10.9.9.9")),
            extra=draw(EXTRAS),
        )
        for server_id, ids in zip(server_ids, device_ids, strict=True)
    )
    pods = draw(_super_pods(server_ids)) if has_pods else ()
    return RankTable(dialect, servers, declared_server_count=len(servers), super_pods=pods, extra=draw(EXTRAS))


@st.composite
def _super_pods(draw, server_ids):
    """Return pods that hold every server once, in the order of the list."""
    pod_of = [draw(st.integers(0, 2)) for _ in server_ids]
    members = {}
    for server_id, pod in zip(server_ids, pod_of, strict=True):
        members.setdefault(pod, []).append(server_id)
    return tuple(SuperPod(str(pod), tuple(names), draw(EXTRAS)) for pod, names in members.items())
