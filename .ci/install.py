"""Install packages into this Python as constraints.txt has them, with uv, which takes a third of pip's time.

python .ci/install.py [--torch INDEX] [--size] [WORDS OF PIP INSTALL...]

pip installs uv, and all else where it has been told something that uv has no word for, or where uv fails.

--torch: first torch, as CPU build where one is to be had, and hatchling, which editable installs are made with. INDEX
is an index of CPU builds that is asked beside pip's own; where it is "" or cannot be reached, pip's own index, cache
and find-links have to do. What is about to be downloaded, and its size, is said before; with --size nothing is
installed. CONSTRAINTS in the environment names another file than constraints.txt.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
CONSTRAINTS = os.environ.get("CONSTRAINTS", "constraints.txt")
LOOK_S = 5.0
BIG = "with CUDA, 2 GB and more with NVIDIA's libraries; for the CPU build set TORCH_INDEX to an index that has it"
UV_WORDS = {
    "constraint": "--constraints",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "index-url": "--index-url",
    "trusted-host": "--allow-insecure-host",
}
"""Settings of pip, each of one or more values, and uv's words for them."""
UV_NEEDS_NOT = {
    *("break-system-packages", "cache-dir", "cert", "compile", "default-timeout", "disable-pip-version-check"),
    *("no-cache-dir", "no-color", "no-compile", "no-input", "no-warn-script-location", "progress-bar", "quiet"),
    *("require-virtualenv", "retries", "root-user-action", "timeout", "verbose"),
}


def find_version(package: str) -> str:
    """Return the version of a package that is there, without its build; empty when it is not."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return ""


def is_installed() -> bool:
    """Return whether the torch of the constraints is there, any build of it will do, and hatchling."""
    wanted = re.search(r"^torch==(\S+)", Path(CONSTRAINTS).read_text(), flags=re.MULTILINE)
    return bool(find_version("hatchling")) and wanted is not None and find_version("torch") == wanted[1]


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


def describe_torch(report: str) -> str:
    """Return which torch comes, from what a dry run of pip reports."""
    (torch,) = [package for package in json.loads(report)["install"] if package["metadata"]["name"] == "torch"]
    needs = torch["metadata"].get("requires_dist", [])
    has_cuda = any(need.startswith(("nvidia-", "cuda-")) and "extra ==" not in need for need in needs)
    size = size_in_mb(torch["download_info"]["url"])
    return f"torch {torch['metadata']['version']}: {size}{f', {BIG}' if has_cuda else ''}"


def find_installers() -> list[list[str]]:
    """Return the commands that install: uv's, told what pip has been told by its files and variables, and pip's."""
    pip = [*PIP, "install", "--no-compile", "--no-warn-script-location", "-c", CONSTRAINTS]
    listed = subprocess.run([*PIP, "config", "list"], stdout=subprocess.PIPE, text=True, check=True).stdout
    found = re.findall(r"^(?:global|install|:env:)\.([\w-]+)=(.*)$", listed, flags=re.MULTILINE)
    settings = {name: str(ast.literal_eval(value)) for name, value in found}
    if not UV_WORDS.keys() | UV_NEEDS_NOT >= settings.keys():
        return [pip]
    if not find_version("uv") and subprocess.run([*pip, "--quiet", "uv"], check=False).returncode:
        return [pip]
    if "cert" in settings:
        os.environ["SSL_CERT_FILE"] = settings["cert"]
    words = [f"{word}={value}" for name, word in UV_WORDS.items() for value in settings.get(name, "").split()]
    uv = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, "-c", CONSTRAINTS]
    return [[*uv, "--index-strategy=unsafe-best-match", *words], pip]


def main() -> None:
    """Say what comes, and install it."""
    parser = argparse.ArgumentParser(prog=".ci/install.py", allow_abbrev=False)
    parser.add_argument("--torch", metavar="INDEX")
    parser.add_argument("--size", action="store_true")
    asked, words = parser.parse_known_args()
    look = None
    if asked.torch is not None and (asked.size or not is_installed()):
        more = ["--extra-index-url", asked.torch] if asked.torch and can_be_reached(asked.torch) else []
        words = [*more, "torch", "numpy", "hatchling", *words]
        dry_run = ["--no-deps", "--ignore-installed", "--dry-run", "--quiet", "--report", "-"]
        command = [*PIP, "install", *more, *dry_run, "-c", CONSTRAINTS, "torch"]
        look = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    installers = [] if asked.size or not words else find_installers()
    if look is not None:
        report, _ = look.communicate()
        if look.returncode:
            sys.exit(look.returncode)
        print(describe_torch(report), flush=True)
    if installers and all(subprocess.run([*command, *words], check=False).returncode for command in installers):
        sys.exit(1)


if __name__ == "__main__":
    main()
