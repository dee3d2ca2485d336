"""indexed-job: Kubernetes Indexed Job with a headless Service; core API only, no gang scheduling

Ranks: the Job controller gives each pod its index in JOB_COMPLETION_INDEX; it is the node rank of that pod's msrun.
Pod i has the host name NAME-i; the headless Service makes pod 0 known as NAME-0.NAME before it is ready.
A pod that fails fails the Job (backoffLimit 0): one pod started anew cannot join a job whose peers have stopped.
Restarts: with max_restarts msrun starts the workers in the pods again. To start pods again, use jobset or volcano.
Spares (Kubernetes 1.33): of nodes + spares pods those that come first run the job, the others wait; pod 0 always runs.
When a pod is lost, msrun starts the workers again on those that are left and a spare one, max_restarts times. The Job
succeeds with pod 0, and fails when it has lost more pods than spares.
"""

from launch_templates import pod
from launch_templates.spec import JobSpec

TAKES = (*pod.POD_FIELDS, *pod.RESTART_FIELDS, "spares", "deadline_s")


def build(spec: JobSpec) -> list[pod.Body]:
    """Return the Service, the NetworkPolicy and the Job."""
    master = f"{spec.name}-0.{spec.name}"
    args = pod.pod_args(spec, master, "$(JOB_COMPLETION_INDEX)", restarts=spec.max_restarts > 0)
    body = pod.lean(
        **pod_count(spec),
        activeDeadlineSeconds=spec.deadline_s,
        ttlSecondsAfterFinished=spec.ttl_s,
        template=pod.pod_template(spec, args, subdomain=spec.name),
    )
    job = pod.own_object(spec, "batch/v1", "Job", body, labels=pod.kueue_label(spec))
    return [pod.headless_service(spec, spec.name, {"job-name": spec.name}), *pod.network_policy(spec), job]


def pod_count(spec: JobSpec) -> pod.Body:
    """Fields of a Job whose pods each have an index, all run at once and, but for spare ones, fail as one."""
    pods = spec.nodes + spec.spares
    count = {"completionMode": "Indexed", "completions": pods, "parallelism": pods}
    if not spec.spares:
        return {**count, "backoffLimit": 0}
    first = {"rules": [{"succeededIndexes": "0"}]}
    return {**count, "backoffLimitPerIndex": 0, "maxFailedIndexes": spec.spares, "successPolicy": first}
