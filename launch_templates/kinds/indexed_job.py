"""indexed-job: Kubernetes Indexed Job with a headless Service; core API only, no gang scheduling

Ranks: the Job controller gives each pod its index in JOB_COMPLETION_INDEX; it is the node rank of that pod's msrun.
Pod i has the host name NAME-i; the headless Service makes pod 0 known as NAME-0.NAME before it is ready.
A pod that fails fails the Job (backoffLimit 0): one pod started anew cannot join a job whose peers have stopped.
To start the whole job again after a failure, use jobset or volcano.
"""

from __future__ import annotations

from launch_templates import pod
from launch_templates.spec import JobSpec

TAKES = (*pod.POD_FIELDS, "deadline_s")


def build(spec: JobSpec) -> list[pod.Body]:
    """Return the Service, the NetworkPolicy and the Job."""
    args = pod.pod_args(spec, master_addr=f"{spec.name}-0.{spec.name}", node_rank="$(JOB_COMPLETION_INDEX)")
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": pod.metadata(spec, labels=pod.kueue_label(spec)),
        "spec": pod.lean(
            **pod_count(spec),
            activeDeadlineSeconds=spec.deadline_s,
            ttlSecondsAfterFinished=spec.ttl_s,
            template=pod.pod_template(spec, args, subdomain=spec.name),
        ),
    }
    service = pod.headless_service(spec, spec.name, {"job-name": spec.name})
    return [service, *pod.network_policy(spec), job]


def pod_count(spec: JobSpec) -> pod.Body:
    """Fields of a Job whose pods each have an index, all run at once and fail as one."""
    return {"completionMode": "Indexed", "completions": spec.nodes, "parallelism": spec.nodes, "backoffLimit": 0}
