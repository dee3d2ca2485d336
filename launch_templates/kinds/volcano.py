"""volcano: Volcano Job (batch.volcano.sh/v1alpha1); gang scheduling, the whole job starts again after a failure

Ranks: one task, so the index that the env plugin puts into VC_TASK_INDEX is the node rank of a pod's msrun.
(It restarts at 0 in every task: a second task would repeat ranks.)
With rank_table=true the ConfigMap rings-config-NAME is mounted; msrun waits until its status is completed and takes
ranks and addresses from it.
The svc plugin makes the headless Service; pod 0 is known as NAME-node-0.NAME before it is ready. It also makes a
NetworkPolicy that lets only pods of this job in; network_policy=false turns that off.
Restarts: a pod that fails or is evicted starts all pods again, max_restarts times (maxRetry counts one more). With
max_restarts=0 it ends the job and the failed pods stay, with their logs; a restart deletes them.
With spares msrun starts the workers again, max_restarts times, on the pods that are left and a spare one, and Volcano
starts no job again. The job begins with nodes pods; pod 0 always runs.
No restart repairs exit code 2 of msrun, wrong input, and 93, with which a worker says so: they end the job.
"""

from launch_templates import pod
from launch_templates.spec import JobSpec

TAKES = (*pod.POD_FIELDS, "rank_table", "max_restarts", "spares")


def build(spec: JobSpec) -> list[pod.Body]:
    """Return the ConfigMap of the rank table and the Job."""
    args = pod.pod_args(spec, f"{spec.name}-node-0.{spec.name}", "$(VC_TASK_INDEX)")
    atlas = pod.ATLAS_LABEL if spec.rank_table else {}
    template = pod.pod_template(spec, args, env=pod.ascend_env(spec), labels=atlas, topology="affinity")
    open_network = str(not spec.network_policy).lower()
    final = [{"exitCode": status, "action": "TerminateJob"} for status in (2, 93)]
    after_failure = "RestartJob" if spec.max_restarts else "TerminateJob"
    failures = [{"event": event, "action": after_failure} for event in ("PodFailed", "PodEvicted")]
    task = {"name": "node", "replicas": spec.nodes + spec.spares, "minAvailable": spec.nodes, "template": template}
    body = pod.lean(
        schedulerName="volcano",
        queue=spec.queue,
        priorityClassName=spec.priority,
        minAvailable=spec.nodes,
        # the job fails when its retry count, raised before each restart, reaches this; 0 means 3, the default
        maxRetry=spec.max_restarts + 1,
        ttlSecondsAfterFinished=spec.ttl_s,
        plugins={"env": [], "svc": ["--publish-not-ready-addresses=true", f"--disable-network-policy={open_network}"]},
        policies=[*final, *([] if spec.spares else failures)],
        tasks=[task],
    )
    return [*pod.rank_table_map(spec), pod.own_object(spec, "batch.volcano.sh/v1alpha1", "Job", body, labels=atlas)]
