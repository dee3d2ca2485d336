"""Plans of jobs: small ones, and those of several hosts, compared."""

import json

from msrun.planning.build import build_plan
from msrun.planning.placement.host import HostFacts
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec


def small_spec(folder, workers=1, **changes):
    """Return the settings of a script with a few workers here; its logs go into the folder."""
    settings = {"program": Program("script", "x.py"), "working_directory": folder, "log_dir": folder}
    return LaunchSpec(**{**settings, "worker_num": workers, "local_worker_num": workers, **changes})


def spec_of(folder, **changes):
    """Return the spec of a script of this folder with two workers here; its logs go below the folder."""
    settings = {
        "program": Program("script", str(folder / "train.py")),
        "worker_num": 2,
        "local_worker_num": 2,
        "working_directory": folder,
        "log_dir": folder / "log_output",
    }
    return LaunchSpec(**{**settings, **changes})


def plan_of(spec, host, caller=None, **more):
    settings = {"job_id": "JOB", "run_dir": "/tmp/msrun-JOB", "master_port": 0}
    return build_plan(spec, host, caller=caller or {}, **{**settings, **more})


def small_plan(folder, workers=1, log_dir=None, run_dir="/tmp/r"):
    """Return the plan of job J, a script with a few workers on host h; its logs go into the folder."""
    spec = small_spec(folder, workers, log_dir=log_dir or folder)
    facts = HostFacts("h", "127.0.0.1", (0,))
    return build_plan(spec, facts, caller={}, job_id="J", run_dir=run_dir, master_port=1)


def without_what_is_chosen_at_start(plan):
    """Return a plan without the job's id and ports."""
    plan = json.loads(json.dumps(plan).replace(plan["job_id"], "JOB"))
    del plan["master"]["port"]
    for host in plan["hosts"]:
        del host["env"]["MASTER_PORT"], host["env"]["MS_SCHED_PORT"]
    return plan
