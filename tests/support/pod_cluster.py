"""A cluster for rendered manifests: every pod is a process in a network of its own, as kubelet and controllers do."""

import json
import shlex
import sys
from pathlib import Path

import yaml
from cluster_pods import DOMAIN, pods_of
from commands import command_path
from job_runner import REPOSITORY

CONTAINER = Path(__file__).with_name("pod_container.py")


class PodCluster:
    """Starts the pods of one manifest.

    Attributes:
        pods: in the order of their node ranks; pod i has the address of host i of the network.
        manifest: its text.
        bodies: all objects of it.
    """

    def __init__(self, runner, net, folder, manifest):
        self.pods, self.manifest = pods_of(manifest), manifest
        self.bodies = list(yaml.safe_load_all(manifest))
        self._runner, self._net, self._folder = runner, net, folder
        self._maps = {name: folder / "maps" / name for name in self._volume_maps()}
        self._image = {"PATH": command_path(folder, {"msrun": "-m msrun"})}

    def _volume_maps(self):
        volumes = [volume for pod in self.pods for volume in pod.spec["volumes"]]
        return {volume["configMap"]["name"] for volume in volumes if "configMap" in volume}

    def start(self, working_directory, env, num_pods=None):
        """Start all pods, or the first few; each knows its own address, and nobody's name until `publish_names`."""
        if num_pods is not None:
            del self.pods[num_pods:]
        return [self._start(rank, pod, working_directory, env) for rank, pod in enumerate(self.pods)]

    def publish_names(self):
        """Let all pods find each other, as the DNS server does when it has heard of a headless Service."""
        lines = [
            f"{self._net.address(rank)} {' '.join(pod.known_as)}\n"
            for rank, pod in enumerate(self.pods)
            if pod.known_as
        ]
        for rank in range(len(self.pods)):
            with self._hosts_file(rank).open("a") as file:
                file.write("".join(lines))

    def write_map(self, name, files, version):
        """Write a ConfigMap as the kubelet does: files are links into a folder that one rename replaces."""
        place = self._maps[name]
        data = place / f"..2026_{version}"
        data.mkdir(parents=True)
        for file, text in files.items():
            (data / file).write_text(text)
            if not (place / file).is_symlink():
                (place / file).symlink_to(Path("..data", file))
        (place / "..data_tmp").symlink_to(data.name)
        (place / "..data_tmp").replace(place / "..data")

    def log_folder(self, rank):
        """What the pod's volume `logs` holds."""
        return self._folder / f"logs_{rank}"

    def _hosts_file(self, rank):
        return self._folder / f"hosts_{rank}"

    def _start(self, rank, pod, working_directory, env):
        path = self._write_spec(rank, pod, working_directory, {**env, **pod.environ})
        logs = f"{self.log_folder(rank)}/log_output{f'/node_{rank}' if rank else ''}"
        return self._runner.start(
            cwd=REPOSITORY, prefix=self._net.prefix(rank), command=[sys.executable, str(CONTAINER), path], log_dir=logs
        )

    def start_launcher(self, working_directory, env):
        """Start the launcher of an MPIJob, on the network's control host.

        Its ssh reaches the workers, where sshd gives commands no variable of the pod.
        """
        *workers, launcher = self.pods
        lines = ["#!/bin/sh", 'host=$1; shift; case "$host" in']
        for rank, pod in enumerate(workers):
            path = self._write_spec(rank, pod, working_directory, env)
            into = shlex.join([*self._net.prefix(rank), sys.executable, str(CONTAINER), path])
            lines.append(f'{pod.known_as[1]}) exec {into} sh -c "$*";;')
        agent = self._folder / "agent"  # mpirun gives a program called ssh options of its own
        agent.write_text("\n".join([*lines, '*) echo "no host $host" >&2; exit 255;; esac', ""]))
        agent.chmod(0o755)
        hostfile = self._folder / "mpi"
        hostfile.mkdir()
        (hostfile / "hostfile").write_text("".join(f"{pod.known_as[1]} slots=1\n" for pod in workers))
        as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        mpi = {
            **as_root,
            "OMPI_MCA_plm_rsh_agent": str(agent),
            "OMPI_MCA_orte_default_hostfile": f"{hostfile}/hostfile",
        }
        own = len(workers)
        path = self._write_spec(own, launcher, working_directory, {**env, **launcher.environ, **mpi})
        self.publish_names()
        command = [sys.executable, str(CONTAINER), path]
        logs = f"{self.log_folder(0)}/log_output"
        return self._runner.start(cwd=REPOSITORY, prefix=self._net.prefix(own), command=command, log_dir=logs)

    def _write_spec(self, rank, pod, working_directory, env):
        names = [f"{pod.name}.{pod.subdomain}.{DOMAIN}"] if pod.subdomain else []
        own = " ".join([self._net.address(rank), *names, pod.name])
        self._hosts_file(rank).write_text(f"127.0.0.1 localhost\n{own}\n")
        for folder in (self.log_folder(rank), self._folder / f"root_{rank}"):
            folder.mkdir()
        mounts = {"/etc/hosts": str(self._hosts_file(rank))}
        for mount in pod.container["volumeMounts"]:
            mounts[mount["mountPath"]] = self._source(rank, pod, mount["name"])
        spec = {
            "host_name": pod.name,
            "root": str(self._folder / f"root_{rank}"),
            "mounts": mounts,
            "working_directory": str(working_directory),
            "words": pod.words,
            "env": {**self._runner.environ(), **self._image, **env},
        }
        path = self._folder / f"pod_{rank}.json"
        path.write_text(json.dumps(spec))
        return str(path)

    def _source(self, rank, pod, volume_name):
        [volume] = [volume for volume in pod.spec["volumes"] if volume["name"] == volume_name]
        if "configMap" in volume:
            return str(self._maps[volume["configMap"]["name"]])
        return "tmpfs" if volume["emptyDir"].get("medium") == "Memory" else str(self.log_folder(rank))
