"""jobset: JobSet (jobset.x-k8s.io/v1alpha2); the whole job starts again after a failure

Ranks: one replicated job, so the index in JOB_COMPLETION_INDEX is the node rank of a pod's msrun.
JobSet makes the headless Service; pod 0 is known as NAME-node-0-0.NAME before it is ready.
Restarts: a pod that fails fails its Job, and JobSet starts all pods again, max_restarts times. No restart repairs exit
code 2 of msrun, wrong input, 126 and 127, a program that cannot be run, and 93, with which a worker says so: the pod
failure policy then fails the JobSet at once, and after what no_restart_on and restart_on say. An evicted pod (a drained
or preempted node) starts all again without using up max_restarts, where this is 1 or more (JobSet 0.9).
Spares (Kubernetes 1.33): of nodes + spares pods those that come first run the job, the others wait; pod 0 always runs.
When one is lost or evicted, or a worker fails, msrun starts the workers again, max_restarts times, on the pods that are
left and a spare one. Only when that is not possible, JobSet starts all pods again.
Topology, without a queue of Kueue: the job has one value of the label for itself (JobSet's exclusive placement).
"""

from typing import Any

from launch_templates import pod
from launch_templates.kinds.indexed_job import pod_count
from launch_templates.spec import JobSpec

TAKES = (*pod.POD_FIELDS, *pod.RESTART_FIELDS, "spares", "deadline_s")

EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
FINAL_STATUSES = (2, 93, 126, 127)
"""After which nothing starts again: wrong input of msrun; a worker that says so, cannot be run or is not there."""
NO_WORKERS_STATUSES = (3, 124)
"""Of msrun where no worker failed: a host or a process of msrun's own was lost, or not everybody came in time."""


def build(spec: JobSpec) -> list[pod.Body]:
    """Return the NetworkPolicy and the JobSet."""
    args = pod.pod_args(spec, f"{spec.name}-node-0-0.{spec.name}", "$(JOB_COMPLETION_INDEX)")
    template = pod.pod_template(spec, args, topology="controller")
    job = {"spec": pod.lean(**job_spec(spec, template, "msrun"), activeDeadlineSeconds=spec.deadline_s)}
    body = set_spec(spec, job, subdomain=spec.name)
    exclusive = {EXCLUSIVE: spec.topology} if spec.topology and not spec.queue else {}
    labels, api = pod.kueue_label(spec), "jobset.x-k8s.io/v1alpha2"
    return [*pod.network_policy(spec), pod.own_object(spec, api, "JobSet", body, labels=labels, annotations=exclusive)]


def set_spec(spec: JobSpec, job: pod.Body, **network: Any) -> pod.Body:
    """Return the spec of a JobSet of one replicated job that starts again as a whole.

    The message of the Job's condition tells an eviction from an exit status, both of which its pod failure policy ends.
    """
    final = {"name": "no-restart", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    pattern = {"onJobFailureMessagePatterns": [".*has condition DisruptionTarget.*"]}
    eviction = {**final, "name": "eviction", "action": "RestartJobSetAndIgnoreMaxRestarts", **pattern}
    rules = [*([eviction] if spec.max_restarts and not spec.spares else []), final]
    return {
        "ttlSecondsAfterFinished": spec.ttl_s,
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, **network},
        "failurePolicy": {"maxRestarts": spec.max_restarts, "rules": rules},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": job}],
    }


def job_spec(spec: JobSpec, template: pod.Body, container: str) -> pod.Body:
    """Return the spec of its Job, with the exit statuses after which that ends, though it could start again."""
    operator, statuses = "In", {*FINAL_STATUSES, *spec.no_restart_on}
    if spec.restart_on:
        operator, statuses = "NotIn", {*NO_WORKERS_STATUSES, *spec.restart_on}
    codes = {"containerName": container, "operator": operator, "values": sorted(statuses)}
    rules: list[pod.Body] = [{"action": "FailJob", "onExitCodes": codes}]
    if spec.max_restarts:  # first, as an evicted pod ends with the status of a signal
        action = "FailIndex" if spec.spares else "FailJob"
        rules.insert(0, {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]})
    policy = {"podReplacementPolicy": "Failed", "podFailurePolicy": {"rules": rules}}
    return {**pod_count(spec), **policy, "template": template}
