"""Jobs on hosts that agents on this machine stand for: several hosts without SSH and without root."""

from job_runner import MARK, wait_until

LIMIT = "--heartbeat_time_out=12"  # on a busy machine, too, nobody is to be given up by mistake


class Rehearsals:
    """Starts `msrun --rehearse` in a folder, which all hosts see."""

    def __init__(self, runner, cwd):
        self.runner = runner
        self.cwd = cwd

    def start(self, hosts, *words, **env):
        """Start a job; `hosts` as in 2x2."""
        options = [f"--rehearse={hosts}", f"--forward_env={MARK}", LIMIT]
        return self.runner.start(*options, *words, cwd=self.cwd, env=env)

    def run(self, hosts, *words, **env):
        """Run a job to its end; nothing of it may be left."""
        finished = self.start(hosts, *words, **env).finish()
        self.runner.prove_nothing_left()
        return finished

    def agent(self, number):
        """Return the process id of an agent, as it has written it down; those of a first start count as their hosts."""

        def find():
            paths = [*self.runner.temporary.glob(f"msrun-spool-*-{number}/agent.pid")]
            words = paths[0].read_text().split() if paths else []
            return int(words[0]) if words else 0

        return int(wait_until(find, f"agent {number}"))
