"""ascendjob: AscendJob (mindxdl.gitee.com/v1) of MindCluster's ascend-operator; gang scheduling by Volcano

Ranks: the operator puts the pod's index over both replica types into RANK: the master is 0, workers follow. Its
WORLD_SIZE and LOCAL_RANK are not those of one process; msrun gives every worker the true ones.
The operator's own Service has an address that is not the master's; the headless Service NAME-rendezvous makes the
master known under its own before it is ready.
With rank_table=true the operator writes the rank table into the ConfigMap rings-config-NAME; msrun waits until its
status is completed, and takes ranks and addresses from it instead.
A pod that fails fails the job. Single pods started anew cannot join a job whose peers have stopped: for restarts use
volcano.
"""

from typing import Any

from launch_templates import pod
from launch_templates.kinds.pytorchjob import roles, run_policy
from launch_templates.spec import JobSpec

# its definition is older than containers that restart by themselves
TAKES = (*(name for name in pod.POD_FIELDS if name not in ("sidecars", "resource_claims")), "rank_table", "deadline_s")


def build(spec: JobSpec) -> list[pod.Body]:
    """Return the ConfigMap of the rank table, the Service of the master, the NetworkPolicy and the AscendJob."""
    name = f"{spec.name}-rendezvous"
    args = pod.pod_args(spec, name, "$(RANK)")
    names: dict[str, Any] = {"container": "ascend", "port_name": "ascendjob-port", "schedulerName": "volcano"}
    labels = ({"app.kubernetes.io/component": component, **pod.ATLAS_LABEL} for component in ("master", "worker"))
    master, worker = (
        pod.pod_template(spec, args, env=pod.ascend_env(spec), labels=one, topology="affinity", **names)
        for one in labels
    )
    selector = {"app.kubernetes.io/instance": spec.name, "app.kubernetes.io/component": "master"}
    scheduling = {"minAvailable": spec.nodes, "queue": spec.queue or "default"}
    body = {
        "schedulerName": "volcano",
        "runPolicy": {**run_policy(spec), "schedulingPolicy": scheduling},
        "successPolicy": "AllWorkers",
        "replicaSpecs": roles(spec, master, worker),
    }
    framework = {"framework": "pytorch", **pod.ATLAS_LABEL}
    job = pod.own_object(spec, "mindxdl.gitee.com/v1", "AscendJob", body, labels=framework)
    return [*pod.rank_table_map(spec), pod.headless_service(spec, name, selector), *pod.network_policy(spec), job]
