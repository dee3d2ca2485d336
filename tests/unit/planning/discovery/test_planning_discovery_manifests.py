"""Pods of the manifests that launch_templates renders find the assignments that the manifests give them."""

from __future__ import annotations

import pytest
from cluster_pods import DOMAIN, Pod, pods_of

from launch_templates import render_manifest
from msrun.planning.discovery.host_options import find_host_options
from msrun.planning.discovery.schedulers import find_surroundings
from msrun.planning.discovery.surroundings import HostView

NODES = 3
VALUES = {"name": "train", "image": "registry.example/train:1", "nodes": NODES, "local_worker_num": 4}


def view(pod: Pod) -> HostView:
    return HostView(pod.name, f"{pod.subdomain}.{DOMAIN}" if pod.subdomain else "")


@pytest.mark.parametrize("kind", ["indexed-job", "jobset", "trainjob", "volcano", "pytorchjob", "leaderworkerset"])
def test_pods_find_the_places_that_their_manifest_gives(kind: str) -> None:
    pods = pods_of(render_manifest(kind, VALUES, ["train.py"]))
    assert len(pods) == NODES
    for rank, pod in enumerate(pods):
        numbers = {name: int(pod.args[name]) for name in ("worker_num", "local_worker_num")}
        job = find_surroundings(pod.environ, view(pod))
        assert job is not None
        options = {"node_rank": -1, "master_addr": "127.0.0.1", "master_port": 0, **numbers}
        found = find_host_options(job, options, set(numbers), lambda: 0).options
        assert found["node_rank"] == rank == int(pod.args["node_rank"])
        assert str(found["master_addr"]).removesuffix(f".{DOMAIN}").removesuffix(".default") == pod.args["master_addr"]


@pytest.mark.parametrize("kind", ["volcano", "pytorchjob", "trainjob"])
def test_pods_that_know_their_number_need_no_option_at_all(kind: str) -> None:
    pod = pods_of(render_manifest(kind, VALUES, ["train.py"]))[1]
    job = find_surroundings(pod.environ, view(pod))
    assert job is not None
    options = {"worker_num": 8, "local_worker_num": None, "node_rank": -1, "master_addr": "127.0.0.1", "master_port": 0}
    found = find_host_options(job, options, set(), lambda: 4).options
    assert (found["worker_num"], found["local_worker_num"], found["node_rank"]) == (NODES * 4, 4, 1)
