"""Pods as the controllers of rendered manifests make them: names, variables, addresses and exit rules."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

IN_CLUSTER = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
DOMAIN = "default.svc.cluster.local"


@dataclass(frozen=True)
class Pod:
    """One pod: what its variables and its /etc/hosts say."""

    spec: dict[str, Any]
    name: str
    subdomain: str
    env: dict[str, str]
    """What the controller adds."""
    known_as: tuple[str, ...]
    """Names under which other pods of the namespace find it."""
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def container(self):
        return self.spec["containers"][0]

    @property
    def environ(self):
        own = {item["name"]: item.get("value", "") for item in self.container.get("env", [])}
        return {**IN_CLUSTER, **own, **self.env}

    @property
    def words(self):
        """Command and arguments as the kubelet expands them."""
        environ = self.environ

        def value(match):
            return "$" if match[0] == "$$" else environ.get(match[1], match[0])

        words = [*self.container["command"], *self.container.get("args", [])]
        return [re.sub(r"\$\$|\$\((\w+)\)", value, word) for word in words]

    @property
    def args(self):
        """The options that the manifest gives this pod's msrun."""
        return dict(
            word.removeprefix("--").split("=", 1) for word in self.words if word.startswith("--") and "=" in word
        )


def pods_of(text):
    """Return the pods of a manifest in the order of their node ranks; after them a launcher."""
    bodies = list(yaml.safe_load_all(text))
    [pods] = [list(_MAKERS[body["kind"], body["apiVersion"]](body, bodies)) for body in bodies if _is_job(body)]
    return pods


def fate_of(text, codes):
    """Return what becomes of the job of a manifest whose pods have first ended with `codes`: done, again or failed.

    Source: the controllers' own pages on pod failure policies, success policies and limits per index (Job), failure
    policies (JobSet) and life-cycle policies (Volcano). Pods of the other kinds end for good, as their restartPolicy is
    Never and their backoffLimit 0.
    """
    failed = [code if code >= 0 else 128 - code for code in codes if code]
    specs = [body["spec"] for body in yaml.safe_load_all(text) if body["kind"] in ("Job", "JobSet", "TrainingRuntime")]
    spares = [count for spec in specs for count in [_num_spares(spec)] if count]
    if not failed or (spares and codes[0] == 0 and len(failed) <= spares[0]):
        return "done"
    actions = [_action(spec, code) for spec in specs for code in failed]
    return "again" if actions and set(actions) == {"restart"} else "failed"


def _num_spares(spec):
    """Pods that may fail while the job goes on, until the first one has succeeded."""
    if "tasks" in spec:  # Volcano completes a job of whose pods minAvailable have succeeded
        fails_alone = any("event" in policy for policy in spec["policies"])
        return 0 if fails_alone else sum(task["replicas"] for task in spec["tasks"]) - spec["minAvailable"]
    jobs = _set_spec(spec).get("replicatedJobs")
    job = jobs[0]["template"]["spec"] if jobs else spec
    if "backoffLimitPerIndex" not in job:
        return 0
    assert job["backoffLimitPerIndex"] == 0 and job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert "backoffLimit" not in job, "it would end the job with the first pod that fails"
    return job["maxFailedIndexes"]


def _set_spec(spec):
    return spec.get("template", {}).get("spec", spec) if "mlPolicy" in spec else spec


def _action(spec, code):
    if "policies" in spec:  # Volcano looks at the rules in their order
        matching = (one for one in spec["policies"] if one.get("exitCode", code) == code)
        first = next((one for one in matching if one.get("event") in (None, "PodFailed")), {"action": ""})
        return "restart" if first["action"] == "RestartJob" and spec["maxRetry"] > 1 else "end"
    spec = _set_spec(spec)
    for job in spec.get("replicatedJobs", []):
        rules = job["template"]["spec"]["podFailurePolicy"]["rules"]
        codes = [rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule]
        if any(code in values for values in codes):
            *_, own = spec["failurePolicy"]["rules"]  # before it stands that for evictions, which are told otherwise
            assert (own["action"], own["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
            return "end"
    return "restart" if spec.get("failurePolicy", {}).get("maxRestarts", 0) else "end"


def _is_job(body):
    return (body["kind"], body["apiVersion"]) in _MAKERS


def _indexed(template, job, subdomain, count, **more):
    for index in range(count):
        name = f"{job}-{index}"
        env = {"JOB_COMPLETION_INDEX": str(index), **{key: value.format(index=index) for key, value in more.items()}}
        yield Pod(template["spec"], name, subdomain, env, (f"{name}.{subdomain}", f"{name}.{subdomain}.{DOMAIN}"))


def _job(body, _bodies):
    template, name = body["spec"]["template"], body["metadata"]["name"]
    yield from _indexed(template, name, template["spec"]["subdomain"], body["spec"]["completions"])


def _job_set(body, _bodies):
    subdomain = body["spec"]["network"]["subdomain"]
    for job in body["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        for number in range(job["replicas"]):
            name = f"{body['metadata']['name']}-{job['name']}-{number}"
            yield from _indexed(spec["template"], name, subdomain, spec["completions"])


def _train_job(body, bodies):
    """kubeflow/trainer: pkg/runtime/framework/plugins/torch."""
    name, trainer = body["metadata"]["name"], body["spec"]["trainer"]
    [runtime] = [one for one in bodies if one["kind"] == body["spec"]["runtimeRef"]["kind"]]
    [job] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pet = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": "{index}",
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29400",
    }
    template = job["template"]["spec"]["template"]
    yield from _indexed(template, f"{name}-{job['name']}-0", name, trainer["numNodes"], **pet)


def _leader_worker_set(body, _bodies):
    """kubernetes-sigs/lws: pkg/utils/pod/pod_utils.go."""
    name, group = body["metadata"]["name"], body["spec"]["leaderWorkerTemplate"]
    for index in range(group["size"]):
        own = f"{name}-0-{index}" if index else f"{name}-0"
        env = {
            "LWS_LEADER_ADDRESS": f"{name}-0.{name}.default",
            "LWS_GROUP_SIZE": str(group["size"]),
            "LWS_WORKER_INDEX": str(index),
        }
        known = tuple(f"{own}.{name}{more}" for more in ("", ".default", f".{DOMAIN}"))
        yield Pod(group["workerTemplate"]["spec"], own, name, env, known)


def _volcano(body, _bodies):
    name = body["metadata"]["name"]
    for task in body["spec"]["tasks"]:
        names = [f"{name}-{task['name']}-{index}" for index in range(task["replicas"])]
        stem = f"VC_{task['name'].upper().replace('-', '_')}"
        known = {f"{stem}_HOSTS": ",".join(f"{pod}.{name}" for pod in names), f"{stem}_NUM": str(len(names))}
        for index, pod in enumerate(names):
            env = {**known, "VC_TASK_INDEX": str(index), "VK_TASK_INDEX": str(index)}
            yield Pod(task["template"]["spec"], pod, name, env, (f"{pod}.{name}", f"{pod}.{name}.{DOMAIN}"))


def _replicas(body, key):
    return [
        (f"{body['metadata']['name']}-{role.lower()}-{index}", spec["template"])
        for role, spec in body["spec"][key].items()
        for index in range(spec["replicas"])
    ]


def _pytorch_job(body, _bodies):
    """kubeflow/training-operator 1.9: pkg/controller.v1/pytorch/envvar.go."""
    replicas = _replicas(body, "pytorchReplicaSpecs")
    elastic = body["spec"].get("elasticPolicy")
    if elastic:  # elastic.go: no rank
        counts = f"{elastic['minReplicas']}:{elastic['maxReplicas']}"
        pet = {
            "PET_NNODES": counts,
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ENDPOINT": f"{replicas[0][0]}:{elastic['rdzvPort']}",
        }
        for name, template in replicas:
            yield Pod(template["spec"], name, "", {**pet, "PYTHONUNBUFFERED": "1"}, (name, f"{name}.{DOMAIN}"))
        return
    for rank, (name, template) in enumerate(replicas):
        place = {"RANK": str(rank), "WORLD_SIZE": str(len(replicas)), "PYTHONUNBUFFERED": "1"}
        pet = {"PET_NODE_RANK": str(rank), "PET_NNODES": str(len(replicas)), "PET_NPROC_PER_NODE": "auto"}
        env = {**place, **pet, "MASTER_ADDR": replicas[0][0], "MASTER_PORT": "23456"}
        yield Pod(template["spec"], name, "", env, (name, f"{name}.{DOMAIN}"))


def _ascend_job(body, bodies):
    """Ascend/mind-cluster: ascend-operator/pkg/controllers/v1/env.go; MASTER_ADDR is the address of a Service."""
    replicas = _replicas(body, "replicaSpecs")
    devices = next(
        amount for key, amount in replicas[0][1]["spec"]["containers"][0]["resources"]["limits"].items() if "/" in key
    )
    for rank, (name, template) in enumerate(replicas):
        labels = template["metadata"]["labels"]
        services = [
            one for one in bodies if one["kind"] == "Service" and one["spec"]["selector"].items() <= labels.items()
        ]
        env = {
            "MASTER_ADDR": "10.96.0.7",
            "MASTER_PORT": str(
                body["spec"]["replicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"]
            ),
            "RANK": str(rank),
            "WORLD_SIZE": str(devices * len(replicas)),
            "LOCAL_WORLD_SIZE": str(devices),
            "LOCAL_RANK": ",".join(map(str, range(devices))),
            "MINDX_TASK_ID": "0123",
        }
        yield Pod(template["spec"], name, "", env, tuple(service["metadata"]["name"] for service in services), labels)


def _mpi_job(body, _bodies):
    """kubeflow/mpi-operator 0.5: pkg/controller/mpi_job_controller.go. The workers, then the launcher."""
    name, specs = body["metadata"]["name"], body["spec"]["mpiReplicaSpecs"]
    for index in range(specs["Worker"]["replicas"]):
        own = f"{name}-worker-{index}"
        known = tuple(f"{own}.{name}{more}" for more in ("", ".default.svc", f".{DOMAIN}"))
        yield Pod(specs["Worker"]["template"]["spec"], own, name, {}, known)
    env = {
        "K_MPI_JOB_ROLE": "launcher",
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
        "OMPI_MCA_orte_set_default_slots": str(body["spec"]["slotsPerWorker"]),
    }
    yield Pod(specs["Launcher"]["template"]["spec"], f"{name}-launcher", name, env, ())


_MAKERS = {
    ("Job", "batch/v1"): _job,
    ("JobSet", "jobset.x-k8s.io/v1alpha2"): _job_set,
    ("TrainJob", "trainer.kubeflow.org/v1alpha1"): _train_job,
    ("Job", "batch.volcano.sh/v1alpha1"): _volcano,
    ("PyTorchJob", "kubeflow.org/v1"): _pytorch_job,
    ("LeaderWorkerSet", "leaderworkerset.x-k8s.io/v1"): _leader_worker_set,
    ("AscendJob", "mindxdl.gitee.com/v1"): _ascend_job,
    ("MPIJob", "kubeflow.org/v2beta1"): _mpi_job,
}
