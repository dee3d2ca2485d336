"""Pods of the manifests that launch_templates renders find the seats that the manifests give them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from launch_templates import list_templates, render_manifest
from msrun.planning.discovery.register import find_surroundings
from msrun.planning.discovery.seat import find_seat
from msrun.planning.discovery.surroundings import HostView

NODES = 3
VALUES = {"name": "train", "image": "registry.example/train:1", "nodes": NODES, "local_worker_num": 4}
IN_CLUSTER = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


@dataclass(frozen=True)
class Pod:
    """A pod as its controller makes it: what its variables and its /etc/hosts say."""

    spec: dict[str, Any]
    name: str
    subdomain: str
    env: dict[str, str]

    @property
    def view(self) -> HostView:
        domain = f"{self.subdomain}.default.svc.cluster.local" if self.subdomain else ""
        return HostView(self.name, domain)

    @property
    def environ(self) -> dict[str, str]:
        own = {item["name"]: item.get("value", "") for item in self.spec["containers"][0].get("env", [])}
        return {**IN_CLUSTER, **own, **self.env}

    @property
    def args(self) -> dict[str, str]:
        """The options that the manifest gives this pod's msrun, as the kubelet expands them."""
        words = self.spec["containers"][0]["args"]
        expanded = [re.sub(r"\$\((\w+)\)", lambda match: self.environ[match[1]], word) for word in words]
        return dict(word.removeprefix("--").split("=", 1) for word in expanded if word.startswith("--") and "=" in word)


def indexed_pods(template: dict[str, Any], job: str, subdomain: str, count: int) -> Iterator[Pod]:
    for index in range(count):
        yield Pod(template["spec"], f"{job}-{index}", subdomain, {"JOB_COMPLETION_INDEX": str(index)})


def pods_of_job(body: dict[str, Any]) -> Iterator[Pod]:
    template = body["spec"]["template"]
    yield from indexed_pods(
        template, body["metadata"]["name"], template["spec"]["subdomain"], body["spec"]["completions"]
    )


def pods_of_jobset(body: dict[str, Any]) -> Iterator[Pod]:
    for job in body["spec"]["replicatedJobs"]:
        for number in range(job["replicas"]):
            name = f"{body['metadata']['name']}-{job['name']}-{number}"
            spec = job["template"]["spec"]
            yield from indexed_pods(spec["template"], name, body["spec"]["network"]["subdomain"], spec["completions"])


def pods_of_volcano(body: dict[str, Any]) -> Iterator[Pod]:
    name = body["metadata"]["name"]
    for task in body["spec"]["tasks"]:
        names = [f"{name}-{task['name']}-{index}" for index in range(task["replicas"])]
        stem = f"VC_{task['name'].upper().replace('-', '_')}"
        known = {f"{stem}_HOSTS": ",".join(f"{pod}.{name}" for pod in names), f"{stem}_NUM": str(len(names))}
        for index, pod in enumerate(names):
            yield Pod(task["template"]["spec"], pod, name, {**known, "VC_TASK_INDEX": str(index), "VK_TASK_INDEX": "9"})


def pods_of_pytorch_job(body: dict[str, Any]) -> Iterator[Pod]:
    replicas = [
        (f"{body['metadata']['name']}-{kind.lower()}-{index}", spec["template"]["spec"])
        for kind, spec in body["spec"]["pytorchReplicaSpecs"].items()
        for index in range(spec["replicas"])
    ]
    for rank, (name, spec) in enumerate(replicas):
        place = {"RANK": str(rank), "WORLD_SIZE": str(len(replicas))}
        pet = {"PET_NODE_RANK": str(rank), "PET_NNODES": str(len(replicas)), "PET_NPROC_PER_NODE": "auto"}
        yield Pod(spec, name, "", {**place, **pet, "MASTER_ADDR": replicas[0][0], "MASTER_PORT": "23456"})


PODS = {
    "indexed-job": ("Job", pods_of_job),
    "jobset": ("JobSet", pods_of_jobset),
    "volcano": ("Job", pods_of_volcano),
    "pytorchjob": ("PyTorchJob", pods_of_pytorch_job),
}


def test_every_template_has_its_pods() -> None:
    assert set(list_templates()) == PODS.keys()


@pytest.mark.parametrize("template", PODS)
def test_pods_find_the_seats_that_their_manifest_gives(template: str) -> None:
    kind, pods_of = PODS[template]
    documents = yaml.safe_load_all(render_manifest(template, VALUES, ["train.py"]))
    pods = list(pods_of(next(body for body in documents if body["kind"] == kind)))
    assert len(pods) == NODES
    for rank, pod in enumerate(pods):
        numbers = {name: int(pod.args[name]) for name in ("worker_num", "local_worker_num")}
        job = find_surroundings(pod.environ, pod.view)
        assert job is not None
        options = {"node_rank": -1, "master_addr": "127.0.0.1", "master_port": 0, **numbers}
        found = find_seat(job, options, set(numbers), lambda: 0).options
        assert found["node_rank"] == rank == int(pod.args["node_rank"])
        assert str(found["master_addr"]).removesuffix(".default.svc.cluster.local") == pod.args["master_addr"]


@pytest.mark.parametrize("template", ["volcano", "pytorchjob"])
def test_pods_that_know_their_number_need_no_option_at_all(template: str) -> None:
    kind, pods_of = PODS[template]
    documents = yaml.safe_load_all(render_manifest(template, VALUES, ["train.py"]))
    pod = list(pods_of(next(body for body in documents if body["kind"] == kind)))[1]
    job = find_surroundings(pod.environ, pod.view)
    assert job is not None
    options = {"worker_num": 8, "local_worker_num": None, "node_rank": -1, "master_addr": "127.0.0.1", "master_port": 0}
    found = find_seat(job, options, set(), lambda: 4).options
    assert (found["worker_num"], found["local_worker_num"], found["node_rank"]) == (NODES * 4, 4, 1)
