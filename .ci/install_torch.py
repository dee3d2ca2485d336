"""Install torch into this Python as constraints.txt has it: the CPU build where one is to be had. And hatchling, which
editable installs are made with, so that pip need not fetch it for each of them.

python .ci/install_torch.py [--size] [INDEX]

INDEX is an index of CPU builds that pip asks beside its own. Without it, or where it cannot be reached, pip's own
index, cache and --find-links have to do. What is about to be downloaded, and its size, is said before; with --size
nothing is installed. CONSTRAINTS in the environment names another file than constraints.txt.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile"]
CONSTRAINTS = os.environ.get("CONSTRAINTS", "constraints.txt")
TORCH = ["-c", CONSTRAINTS, "torch", "numpy", "hatchling"]
LOOK_S = 5.0
BIG = "with CUDA, 2 GB and more with NVIDIA's libraries; for the CPU build set TORCH_INDEX to an index that has it"


def is_installed() -> bool:
    """Return whether the torch of the constraints is there, any build of it will do, and hatchling."""
    wanted = re.search(r"^torch==(\S+)", Path(CONSTRAINTS).read_text(), flags=re.MULTILINE)
    try:
        return bool(version("hatchling")) and wanted is not None and version("torch").partition("+")[0] == wanted[1]
    except PackageNotFoundError:
        return False


def can_be_reached(index: str) -> bool:
    """Return whether an index answers at once; pip would ask it again and again."""
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=LOOK_S):
            return True
    except OSError:
        return False


def size_in_mb(url: str) -> str:
    """Return the size of a file, as far as its server tells."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=LOOK_S) as answer:
            return f"{int(answer.headers['Content-Length']) / 1e6:.0f} MB"
    except (OSError, TypeError, ValueError):
        return "of unknown size"


def main() -> None:
    """Say what comes, and install it with pip's own progress."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--size"]
    is_asked_only = len(arguments) < len(sys.argv) - 1
    if is_installed() and not is_asked_only:
        return
    index = arguments[0] if arguments else ""
    more = ["--extra-index-url", index] if index and can_be_reached(index) else []
    look = [*PIP, *more, *TORCH, "--no-deps", "--ignore-installed", "--dry-run", "--quiet", "--report", "-"]
    report = json.loads(subprocess.run(look, stdout=subprocess.PIPE, check=True).stdout)
    (torch,) = [package for package in report["install"] if package["metadata"]["name"] == "torch"]
    needs = torch["metadata"].get("requires_dist", [])
    has_cuda = any(need.startswith(("nvidia-", "cuda-")) and "extra ==" not in need for need in needs)
    size = size_in_mb(torch["download_info"]["url"])
    print(f"torch {torch['metadata']['version']}: {size}{f', {BIG}' if has_cuda else ''}", flush=True)
    if not is_asked_only:
        subprocess.run([*PIP, *more, *TORCH, "--no-warn-script-location"], check=True)


if __name__ == "__main__":
    main()
