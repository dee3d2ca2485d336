from msrun.errors import ClusterError


def explain_agent_end(exit_status, stderr_text, entry):
    return ClusterError(f"{entry.name}: agent ended {exit_status}: {stderr_text}")
