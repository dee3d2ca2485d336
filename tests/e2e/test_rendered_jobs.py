"""Rendered jobs run as they are: pods as processes in networks of their own train together, and fail as one."""

import json
import shutil
import signal

import numpy as np
import pytest
from cluster_pods import fate_of
from commands import command_path
from host_net import HostNet
from job_runner import REPOSITORY, WORKER_IMPORTS, WORKER_PATH, read_record, wait_until
from loss_lines import losses
from pod_cluster import PodCluster
from slurm_cluster import SlurmCluster
from ssh_net import SshNet

from launch_templates import render_manifest
from msrun.data import write_idx
from ranktable import build_table, encode_table

VALUES = {
    "name": "train",
    "image": "registry.example/train:1",
    "nodes": 2,
    "local_worker_num": 2,
    "cluster_time_out": 60,
    "grace_s": 20,
}
KINDS = ("indexed-job", "jobset", "pytorchjob", "trainjob", "volcano", "ascendjob", "leaderworkerset")
RESTARTING = ("jobset", "trainjob", "volcano")
"""Kinds whose controller starts all pods again."""
EXAMPLE = REPOSITORY / "examples" / "torch" / "mnist" / "train.py"
DEADLINE_S = 240.0
SRUN = """
import subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
addresses, prefixes = {addresses!r}, {prefixes!r}
step = {{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}}
step["SLURM_STEP_NODELIST"] = ",".join(addresses)
tasks = []
for node, address in enumerate(addresses):
    own = {{**step, "SLURM_NODEID": str(node), "SLURMD_NODENAME": address}}
    env = ["env", *(f"{{name}}={{value}}" for name, value in own.items())]
    tasks.append(subprocess.Popen([*prefixes[node], *env, *words]))
sys.exit(max(task.wait() for task in tasks))
"""
"""srun as it starts a step of one task on each node of an allocation."""
PRELOAD = [f"--preload={name}" for name in WORKER_IMPORTS]


@pytest.fixture(scope="module")
def net():
    """Four nodes for all tests of this module."""
    with HostNet(4) as hosts:
        yield hosts


@pytest.fixture
def cluster(msrun, net, tmp_path):
    """Makes the cluster of a kind that runs a script."""

    def make(kind, *script, **more):
        device = {"device_target": "Ascend"} if kind == "ascendjob" else {}
        manifest = render_manifest(kind, {**VALUES, **device, **more}, [str(word) for word in script])
        folder = tmp_path / "cluster"
        folder.mkdir()
        return PodCluster(msrun, net, folder, manifest)

    return make


@pytest.fixture(scope="module")
def data_of_example(tmp_path_factory):
    """Three batches in the files of MNIST."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    write_idx(folder / "train-images-idx3-ubyte", rng.integers(0, 256, (96, 28, 28), dtype=np.uint8))
    write_idx(folder / "train-labels-idx1-ubyte", rng.integers(0, 10, 96, dtype=np.uint8))
    return folder


@pytest.fixture(scope="module")
def losses_of_example(msrun_of_module, data_of_example):
    """Losses of the example mnist in one process."""
    return losses(msrun_of_module.run_alone(EXAMPLE, DATA_PATH=str(data_of_example), EPOCHS="4").stdout)


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_example_trains_over_four_pods_of_two_workers_as_in_one_process(
    kind, cluster, data_of_example, losses_of_example, tmp_path
):
    env = {"DATA_PATH": str(data_of_example), "EPOCHS": "4"}
    pods = cluster(kind, EXAMPLE, nodes=4, env=env)
    jobs = pods.start(tmp_path, {})
    wait_until(lambda: "trying again" in jobs[3].stderr, "the last pod looks for the name of the first")
    pods.publish_names()
    ended = [job.finish(DEADLINE_S) for job in jobs]
    assert [job.code for job in ended] == [0] * 4, ended
    assert len(losses_of_example) == 4
    np.testing.assert_allclose(losses(ended[0].log(0).decode()), losses_of_example, rtol=1e-4)
    assert (pods.log_folder(3) / "log_output" / "node_3" / "worker_7.log").exists()
    assert fate_of(pods.manifest, [job.code for job in ended]) == "done"


@pytest.mark.slow
def test_rank_table_of_a_config_map_is_awaited_and_copied(cluster, workers, net, tmp_path):
    """The kubelet shows a ConfigMap as links, and replaces all of it at once."""
    pods = cluster("ascendjob", *PRELOAD, workers / "pod_steps.py", tmp_path / "found.json", rank_table=True)
    [first] = [body for body in pods.bodies if body["kind"] == "ConfigMap"]
    pods.write_map(first["metadata"]["name"], first["data"], 1)
    jobs = pods.start(tmp_path, {"PYTHONPATH": WORKER_PATH})
    wait_until(lambda: all('waiting until it is "completed"' in job.stderr for job in jobs), "both pods wait")
    # The pod that the operator made second is node 0 here.
    table = encode_table(build_table([(net.address(1), 2), (net.address(0), 2)], order="given"))
    pods.write_map(first["metadata"]["name"], {"hccl.json": table}, 2)
    ended = [job.finish() for job in jobs]
    assert [job.code for job in ended] == [0, 0], ended
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-9)
    assert not found["is_link"] and json.loads(found["table"]) == json.loads(table)
    assert "this is node 0" in jobs[1].stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_pod_fails_the_others_with_statuses_that_start_the_job_again(kind, cluster, workers, tmp_path):
    """Or, where the controller could only start single pods again, that end it."""
    pods = cluster(kind, workers / "wait.py", nodes=4, **({"max_restarts": 1} if kind in RESTARTING else {}))
    jobs = pods.start(tmp_path, {})
    pods.publish_names()
    jobs[0].wait_for(*(tmp_path / f"ready_{rank}" for rank in range(8)))
    jobs[2].send(signal.SIGKILL)
    codes = [job.finish().code for job in jobs]
    assert codes.pop(2) == -signal.SIGKILL
    assert set(codes) == {3}, "a host was lost"
    assert fate_of(pods.manifest, [*codes, -signal.SIGKILL]) == ("again" if kind in RESTARTING else "failed")


UP = """
import os, time
from pathlib import Path
Path(f"up_{os.environ['TORCHELASTIC_RESTART_COUNT']}_{os.environ['RANK']}").touch()
while not Path("go").exists():
    time.sleep(0.02)
"""
"""A worker that says that it runs, and waits."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["indexed-job", "jobset", "trainjob", "volcano"])
def test_spare_pod_waits_and_takes_the_place_of_a_killed_one(kind, cluster, tmp_path):
    (tmp_path / "up.py").write_text(UP)
    pods = cluster(kind, tmp_path / "up.py", spares=1, max_restarts=1)
    jobs = pods.start(tmp_path, {})
    pods.publish_names()
    jobs[0].wait_for(*(tmp_path / f"up_0_{rank}" for rank in range(4)))
    waits = "this host is used from its next start on"
    wait_until(lambda: any(waits in job.stderr for job in jobs[1:]), "one of three pods waits")
    [lost] = [pod for pod in (1, 2) if waits not in jobs[pod].stderr]
    jobs[lost].send(signal.SIGKILL)
    jobs[0].wait_for(*(tmp_path / f"up_1_{rank}" for rank in range(4)))
    (tmp_path / "go").touch()
    codes = [job.finish().code for job in jobs]
    assert codes == [-signal.SIGKILL if pod == lost else 0 for pod in range(3)], [job.stderr for job in jobs]
    assert fate_of(pods.manifest, codes) == "done"
    assert fate_of(pods.manifest, [0, -signal.SIGKILL, -signal.SIGKILL]) != "done", "more than are spare"


@pytest.mark.slow
def test_a_pod_asked_to_stop_lets_its_workers_save_and_says_so(cluster, workers, tmp_path):
    pods = cluster("jobset", workers / "save_when_ended.py", "SIGTERM")
    jobs = pods.start(tmp_path, {})
    pods.publish_names()
    jobs[0].wait_for(*(tmp_path / f"ready_{rank}" for rank in range(4)))
    for job in jobs:
        job.send(signal.SIGTERM)
    ended = [job.finish() for job in jobs]
    assert {job.code for job in ended} == {128 + signal.SIGTERM}
    assert all(ended[rank // 2].log(rank).startswith(b"saved after SIGTERM\n") for rank in range(4))


@pytest.mark.parametrize("kind", RESTARTING)
def test_a_job_starts_again_after_statuses_that_a_restart_may_repair(kind):
    text, other = (render_manifest(kind, {**VALUES, "max_restarts": count}, ["train.py"]) for count in (1, 0))
    assert {code: fate_of(text, [code]) for code in (0, 1, 2, 3, 93, 137)} == {
        0: "done",
        1: "again",
        2: "failed",
        3: "again",
        93: "failed",
        137: "again",
    }
    assert fate_of(other, [1]) == "failed"


@pytest.mark.slow
def test_elastic_job_begins_with_the_pods_that_have_come(cluster, workers, tmp_path):
    words = ["--join_window=2", workers / "record.py"]
    pods = cluster("pytorchjob", *words, nodes=3, min_nodes=2)
    jobs = pods.start(tmp_path, {}, num_pods=2)
    pods.publish_names()
    ended = [job.finish() for job in jobs]
    assert [job.code for job in ended] == [0, 0], ended
    sizes = {json.loads(path.read_text())["env"]["WORLD_SIZE"] for path in tmp_path.glob("record_*.json")}
    assert sizes == {"4"}


def test_batch_script_of_slurm_starts_one_world_on_all_nodes(msrun, host_net, workers, tmp_path):
    addresses, prefixes = ([make(host) for host in range(2)] for make in (host_net.address, host_net.prefix))
    (tmp_path / "srun.py").write_text(SRUN.format(addresses=addresses, prefixes=prefixes))
    path = command_path(tmp_path, {"srun": str(tmp_path / "srun.py"), "msrun": "-m msrun"})
    script = batch_script(tmp_path, workers / "record.py", local_worker_num=1)
    done = msrun.start(str(script), cwd=tmp_path, command=["bash"], env={"PATH": path}).finish()
    assert done.code == 0, done.stderr
    for rank in range(2):
        env = read_record(tmp_path, rank)["env"]
        told = {"RANK": str(rank), "WORLD_SIZE": "2", "GROUP_RANK": str(rank), "MASTER_ADDR": addresses[0]}
        assert {name: env[name] for name in told} == told


@pytest.fixture(scope="module")
def slurm(net, tmp_path_factory):
    """Slurm itself, on two nodes."""
    with SlurmCluster(net, ["node0", "node1"], tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def submit(slurm, msrun, tmp_path):
    """Has Slurm run the rendered script of a job and returns the exit status of that."""

    def run(*words, **more):
        env = msrun.environ({"PATH": command_path(tmp_path, {"msrun": "-m msrun"}), "PYTHONPATH": WORKER_PATH})
        script = batch_script(tmp_path, *words, **more)
        return slurm.run_batch(script, tmp_path / "job.log", env)

    return run


@pytest.mark.slow
def test_failure_on_one_node_ends_the_job_of_slurm_with_its_status(submit, workers, tmp_path):
    assert submit(workers / "end.py", "3", "9") == 9
    assert "rank 3" in (tmp_path / "job.log").read_text()


@pytest.mark.slow
def test_batch_script_trains_under_slurm_itself_as_one_process_does(submit, workers, tmp_path):
    code = submit(*PRELOAD, workers / "pod_steps.py", tmp_path / "found.json")
    assert code == 0, (tmp_path / "job.log").read_text()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-9)


@pytest.mark.slow
def test_job_of_slurm_saves_before_its_deadline_and_runs_again(slurm, msrun, tmp_path):
    """Slurm sends the signal up to a minute early, and only with the time that it has."""
    worker = tmp_path / "save.py"
    worker.write_text(
        "import os, signal, sys, time\nfrom pathlib import Path\n"
        "place = Path(f\"saved_{os.environ['RANK']}\")\nif place.exists():\n    sys.exit()\n"
        "def save(*_):\n    place.touch()\n    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, save)\nPath(f\"up_{os.environ['RANK']}\").touch()\n"
        "while True:\n    time.sleep(0.02)\n"
    )
    script = batch_script(tmp_path, worker, requeue=True, deadline_s=3600)
    env = msrun.environ({"PATH": command_path(tmp_path, {"msrun": "-m msrun"}), "PYTHONPATH": WORKER_PATH})
    log = tmp_path / "job.log"
    job = slurm.start_batch(script, log, env)
    wait_until(lambda: all((tmp_path / f"up_{rank}").exists() for rank in range(4)), "all workers run")
    slurm.warn(job)
    wait_until(lambda: all((tmp_path / f"saved_{rank}").exists() for rank in range(4)), "all workers have saved")
    assert slurm.finish_batch(job, is_requeued=True) == 0, log.read_text()


@pytest.mark.slow
def test_spare_node_of_slurm_takes_the_place_of_a_lost_one(msrun, tmp_path):
    """Slurm itself keeps the allocation, whose nodes msrun reaches by SSH."""
    log, worker = tmp_path / "job.log", tmp_path / "up.py"
    worker.write_text(UP)
    script = batch_script(tmp_path, "--heartbeat_time_out=3", worker, spares=1, max_restarts=1)
    (tmp_path / "slurm").mkdir()
    with SshNet(3) as hosts, SlurmCluster(hosts, [hosts.name(host) for host in range(3)], tmp_path / "slurm") as nodes:
        env = msrun.environ({"PATH": command_path(tmp_path, {"msrun": "-m msrun"}), "HOME": str(hosts.home)})
        job = nodes.start_batch(script, log, env)
        wait_until((tmp_path / "up_0_3").exists, "all workers run")
        hosts.cut(1)
        wait_until((tmp_path / "up_1_3").exists, "they run again", DEADLINE_S)
        (tmp_path / "go").touch()
        assert nodes.finish_batch(job) == 0, log.read_text()
    assert "starting again on host0, host2" in log.read_text()


def batch_script(folder, *words, **more):
    """Write the script of a job on two nodes of two workers."""
    size = {"nodes": 2, "local_worker_num": 2, "cpu": "1", "memory": "1Gi"}
    values = {"name": "train", **size, "cluster_time_out": 60, "grace_s": 20, **more}
    script = folder / "job.sbatch"
    script.write_text(render_manifest("slurm", values, [str(word) for word in words]))
    return script


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun; apt-get install openmpi-bin")
def test_launcher_of_an_mpi_job_starts_one_world_in_the_workers(cluster, workers, tmp_path):
    pods = cluster("mpijob", workers / "record.py", env={"SETTING": "a b"})
    done = pods.start_launcher(tmp_path, {}).finish()
    assert done.code == 0, done.stderr
    for rank in range(4):
        env = read_record(tmp_path, rank)["env"]
        told = {"RANK": str(rank), "WORLD_SIZE": "4", "GROUP_RANK": str(rank // 2), "SETTING": "a b"}
        assert {name: env[name] for name in told} == told
