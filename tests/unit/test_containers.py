"""compose.yaml, Dockerfile and the hosts' script agree with each other and with msrun."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from job_runner import REPOSITORY, JobRunner


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((REPOSITORY / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def dockerfile():
    return (REPOSITORY / "Dockerfile").read_text()


def copied_sources(dockerfile):
    return re.findall(r"/tmp/msrun/(\S+?\.\w+)", dockerfile)


def test_launcher_waits_for_every_host_that_it_names(compose):
    launcher = compose["services"]["launcher"]
    named = [
        entry.partition(":")[0] for entry in launcher["command"][launcher["command"].index("--hosts") + 1].split(",")
    ]
    assert sorted(named) == sorted(name for name in compose["services"] if name != "launcher")
    assert sorted(launcher["depends_on"]) == sorted(named)
    for name in named:
        service = compose["services"][name]
        assert service["hostname"] == name and service["command"] == ["msrun-host"] and "healthcheck" in service


def test_command_of_the_launcher_is_one_that_msrun_takes(compose, tmp_path):
    launcher = compose["services"]["launcher"]
    folder = REPOSITORY / Path(launcher["working_dir"]).relative_to("/job")
    options = [word.replace("/keys/", f"{tmp_path}/") for word in launcher["command"][1:]]
    with JobRunner() as runner:
        done = subprocess.run(
            [sys.executable, "-m", "msrun", "--dry_run=json", f"--log_dir={tmp_path / 'logs'}", *options],
            cwd=folder,
            env=runner.environ(launcher["environment"]),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert [host["name"] for host in plan["hosts"]] == ["host1", "host2"]
    settings = {setting["name"]: setting["value"] for setting in plan["settings"]}
    assert (settings["ssh_port"], settings["ssh_identity"]) == (2222, ["/keys/id_ed25519"])


def test_port_and_key_are_the_same_everywhere(compose, dockerfile):
    script = (REPOSITORY / "containers" / "host.sh").read_text()
    environment = compose["services"]["launcher"]["environment"]
    assert f"port=${{PORT:-{environment['MSRUN_SSH_PORT']}}}" in script
    assert f"/dev/tcp/127.0.0.1/{environment['MSRUN_SSH_PORT']}" in compose["x-host"]["healthcheck"]["test"][-1]
    folder = str(Path(environment["MSRUN_SSH_IDENTITY"]).parent)
    assert f"keys=${{1:-{folder}}}" in script and f"keys:{folder}" in compose["x-msrun"]["volumes"]
    assert re.search(rf"install -d -o msrun -g msrun {folder} ", dockerfile), (
        "a new volume belongs to whom it does here"
    )


def test_image_is_made_of_files_that_are_there(dockerfile):
    sources = copied_sources(dockerfile)
    assert {"constraints.txt", "containers/host.sh"} <= set(sources)
    assert [name for name in sources if not (REPOSITORY / name).is_file()] == []
