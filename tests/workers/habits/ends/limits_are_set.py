import resource
import subprocess

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    files = [open("/dev/null") for _ in range(100)]  # noqa: SIM115
except OSError as error:
    print(error)
    files = []
subprocess.run(["sh", "-c", "ulimit -c; ulimit -n"])
