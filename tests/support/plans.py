"""Plans of jobs on several hosts, compared."""

from __future__ import annotations

import json
from typing import Any


def without_what_is_chosen_at_start(plan: dict[str, Any]) -> dict[str, Any]:
    """Return a plan without the job's id and ports."""
    plan = json.loads(json.dumps(plan).replace(plan["job_id"], "JOB"))
    del plan["master"]["port"]
    for host in plan["hosts"]:
        del host["env"]["MASTER_PORT"], host["env"]["MS_SCHED_PORT"]
    return plan
