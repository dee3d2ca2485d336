"""jobset: JobSet (jobset.x-k8s.io/v1alpha2); the whole job starts again after a failure

Ranks: one replicated job, so the index in JOB_COMPLETION_INDEX is the node rank of a pod's msrun.
JobSet makes the headless Service; pod 0 is known as NAME-node-0-0.NAME before it is ready.
Restarts: a pod that fails fails its Job, and JobSet starts all pods again, max_restarts times. No restart repairs exit
code 2 of msrun, wrong input, 126 and 127, a program that cannot be run, and 93, with which a worker says so: the pod
failure policy then fails the JobSet at once, and after what no_restart_on and restart_on say. An evicted pod (a drained
or preempted node) starts all again without using up max_restarts, where this is 1 or more (JobSet 0.9).
Topology, without a queue of Kueue: the job has one value of the label for itself (JobSet's exclusive placement).
"""

from __future__ import annotations

from typing import Any

from launch_templates import pod
from launch_templates.kinds.indexed_job import pod_count
from launch_templates.spec import JobSpec

RESTART_FIELDS = ("max_restarts", "restart_on", "no_restart_on")
TAKES = (*pod.POD_FIELDS, *RESTART_FIELDS, "deadline_s")

EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
FINAL_STATUSES = (2, 93, 126, 127)
"""After which nothing starts again: of msrun for wrong input; of a worker that says so, that cannot be run, or whose
program is not there."""
NO_WORKERS_STATUSES = (3, 124)
"""Of msrun where no worker failed: a host or a process of msrun's own was lost, or not everybody came in time."""


def build(spec: JobSpec) -> list[pod.Body]:
    """Return the NetworkPolicy and the JobSet."""
    args = pod.pod_args(spec, master_addr=f"{spec.name}-node-0-0.{spec.name}", node_rank="$(JOB_COMPLETION_INDEX)")
    template = pod.pod_template(spec, args, topology="controller")
    job = {
        "name": "node",
        "replicas": 1,
        "template": {
            "spec": pod.lean(
                **pod_count(spec),
                activeDeadlineSeconds=spec.deadline_s,
                **failure_rules(spec, "msrun"),
                template=template,
            )
        },
    }
    exclusive = {EXCLUSIVE: spec.topology} if spec.topology and not spec.queue else {}
    body = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": pod.metadata(spec, labels=pod.kueue_label(spec), annotations=exclusive),
        "spec": set_spec(spec, job, subdomain=spec.name),
    }
    return [*pod.network_policy(spec), body]


def set_spec(spec: JobSpec, job: pod.Body, **network: Any) -> pod.Body:
    """Return the spec of a JobSet of one replicated job that starts again as a whole.

    The message of the Job's condition tells an eviction from an exit status, both of which its pod failure policy ends.
    """
    reasons = ["PodFailurePolicy"]
    eviction = {
        "name": "eviction",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": reasons,
        "onJobFailureMessagePatterns": [".*has condition DisruptionTarget.*"],
    }
    final = {"name": "no-restart", "action": "FailJobSet", "onJobFailureReasons": reasons}
    rules = [*([eviction] if spec.max_restarts else []), final]
    return {
        "ttlSecondsAfterFinished": spec.ttl_s,
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, **network},
        "failurePolicy": {"maxRestarts": spec.max_restarts, "rules": rules},
        "replicatedJobs": [job],
    }


def failure_rules(spec: JobSpec, container: str) -> pod.Body:
    """Return the pod failure policy: after which exit statuses the job ends, though it could start again."""
    operator, statuses = "In", {*FINAL_STATUSES, *spec.no_restart_on}
    if spec.restart_on:
        operator, statuses = "NotIn", {*NO_WORKERS_STATUSES, *spec.restart_on}
    codes = {"containerName": container, "operator": operator, "values": sorted(statuses)}
    rules: list[pod.Body] = [{"action": "FailJob", "onExitCodes": codes}]
    if spec.max_restarts:  # first, as an evicted pod ends with the status of a signal
        rules.insert(0, {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]})
    return {"podReplacementPolicy": "Failed", "podFailurePolicy": {"rules": rules}}
