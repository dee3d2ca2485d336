import os
import subprocess

os.environ["ONE"] = "1"
os.putenv("TWO", "2")
os.environ.setdefault("THREE", "3")
os.unsetenv("HOME")
for line in ("FOUR=4", "export FIVE=5"):
    name, _, value = line.removeprefix("export ").partition("=")
    os.environ[name] = value
subprocess.run(["sh", "-c", "echo $ONE $TWO $THREE $FOUR $FIVE home=$HOME"])
