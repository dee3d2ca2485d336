"""The code blocks of README and docs, run as a reader would run them."""

import contextlib
import glob
import io
import json
import re
import shlex
import socket
import sys
import time
from collections import Counter

import doc_pages
import pytest
import torch
from commands import command_path
from job_runner import REPOSITORY, WORKER_IMPORTS
from torch import nn

from ranktable.cli import main as ranktable

DEADLINE_S = 120.0
STATUS_S = 20.0
README = REPOSITORY / "README.md"
HOME = re.compile(r"/home/(?:you|me)(?=/|\s|$)")
RUN_BLOCKS = REPOSITORY / "tests" / "workers" / "docs" / "run_blocks.py"
COMMANDS = {
    "msrun": "msrun",
    "msrun-checkpoint": "msrun.runtime.checkpoint.cli",
    "ranktable": "ranktable",
    "launch-template": "launch_templates",
}

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


class Reader:
    """Somebody who types the commands of a page into a shell, in an empty folder."""

    def __init__(self, runner, page, folder):
        self.runner, self.page = runner, page
        self.blocks = doc_pages.blocks(page)
        self.home = folder / "home"
        self.home.mkdir()
        modules = {name: f"-m {module}" for name, module in COMMANDS.items()}
        path = command_path(folder, {**modules, "python": ""}, "/usr/local/bin:/usr/bin:/bin")
        self.env = {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "XDG_RUNTIME_DIR": str(folder)}

    def type(self, command):
        """Run a command; return its exit status and what the terminal shows."""
        if command.startswith("ranktable ") and not {"&&", ">", "|"} & {*command.split()}:
            return self.run_here(command)
        words = (f"{command}\n",) if command.startswith("echo $?") else (f"{{ {command}\n}} 2>&1",)
        job = self.runner.start("-c", *words, cwd=self.home, env=self.env, command=("bash",))
        done = job.finish(DEADLINE_S)
        said = done.stdout.decode() + done.stderr
        return done.code, re.sub(r"^msrun: settings: warm=.*\n", "", said, flags=re.MULTILINE)

    def run_here(self, command):
        """Run ranktable in this process: it takes a tenth of the time of a new one."""
        words = []
        for word in shlex.split(command, comments=True)[1:]:
            words += sorted(glob.glob(word, root_dir=self.home)) if "*" in word else [word]
        said = io.StringIO()
        with contextlib.chdir(self.home), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = ranktable(words)
        return status, said.getvalue()

    def read(self):
        """Do what the page says, in order; return where its output is not what the page shows."""
        faults = []
        status = 0
        for block in self.blocks:
            if block.file_name:
                (self.home / block.file_name).write_text(block.text)
                continue
            if "setup-sh" in block.marks:
                status, said = self.type(block.marks["setup-sh"])
                assert status == 0, f"{block.place}: {said}"
            if block.language not in ("sh", "console") or not block.is_run:
                continue
            for command, shown in block.commands:
                if command == "echo $?":
                    faults += [] if shown == [str(status)] else [f"{block.place}: exit status {status}"]
                    continue
                status, said = self.type(command)
                end = time.monotonic() + STATUS_S
                while command.startswith("msrun --status") and self.differences(shown, said) and time.monotonic() < end:
                    status, said = self.type(command)  # as a reader does whose job has only just begun
                faults += [f"{block.place}: {command}: {fault}" for fault in self.differences(shown, said)]
                if block.language == "sh" and status:
                    faults.append(f"{block.place}: {command}: exit status {status}: {said}")
        return faults

    def differences(self, shown, said):
        """Return lines that the page shows and nobody says; without "...", also lines that it does not show."""
        expected = Counter(self.plain(line) for line in shown if line.strip() and line.strip() != "...")
        actual = Counter(self.plain(line) for line in said.splitlines() if line.strip())
        found = [f"not said: {line}" for line in expected - actual]
        if shown and "..." not in (line.strip() for line in shown):
            found += [f"not shown: {line}" for line in actual - expected]
        return [*found, f"it says:\n{said}"] if found else []

    def plain(self, line):
        """Return a line without what differs between machines and runs."""
        line = line.replace(str(self.home), "/home/you").replace(socket.gethostname(), "vm")
        line = HOME.sub("HOME", line).replace(sys.executable, "PYTHON").replace("HOME/.venv/bin/python3", "PYTHON")
        line = re.sub(r"\b\d{8}-\d{6}-[0-9a-f]{8}\b", "ID", line)
        line = re.sub(r"(?<=\s)-(?=\s|$)", "0", line)  # a number that is not known yet
        line = re.sub(r"\d+(?:\.\d+)?(?:e[+-]\d+)?%?", "0", line)
        return re.sub(r" {2,}", "  ", line).rstrip()


def pages_with_commands():
    """All but the README, which has its own test, and the commands that test_launch_several_hosts.py runs."""
    found = []
    for page in doc_pages.pages():
        has_commands = any(b.language in ("sh", "console") and b.is_run for b in doc_pages.blocks(page))
        if has_commands and page not in (README, doc_pages.DOCS / "how-to" / "security.md"):
            found.append(pytest.param(page, id=str(page.relative_to(REPOSITORY))))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with_commands())
def test_commands_of_a_page_say_what_it_shows(page, msrun, tmp_path):
    faults = Reader(msrun, page, tmp_path).read()
    assert not faults, "\n".join(faults)


def test_a_reader_of_the_readme_gets_to_a_script_a_cut_network_and_a_replaced_host(msrun, tmp_path):
    """By copying what stands there: a torchrun script unchanged, a network cut in two with the right losses, and a host
    that leaves, for which another one comes."""
    reader = Reader(msrun, README, tmp_path)
    # What torch and the runtime cost to import is paid once for all tests.
    reader.env |= {**msrun.warm(), "MSRUN_PRELOAD": ",".join(WORKER_IMPORTS)}
    faults = reader.read()
    assert not faults, "\n".join(faults)
    logs = (path.read_text() for path in (reader.home / "log_output").glob("*/worker_0.log"))
    log = next(text for text in logs if "KB on this rank" in text)
    cut = re.search(r"parameters (\d+) KB of (\d+) KB on this rank", log)
    assert cut is not None and int(cut[1]) <= int(cut[2]) / 2 + 1
    losses = [float(loss) for loss in re.findall(r"^\d (\S+)$", log, re.MULTILINE)]
    assert losses == pytest.approx(plain_torch_losses(), rel=1e-5)


def plain_torch_losses():
    """The README's network in torch alone."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        images, labels = torch.randn(64, 784), torch.randint(0, 10, (64,))
        loss = nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_python_blocks_of_all_pages_run_on_two_ranks(msrun, tmp_path):
    pages = [blocks_to_run(page, tmp_path / "sources" / f"{index}.py") for index, page in enumerate(doc_pages.pages())]
    (tmp_path / "blocks.json").write_text(json.dumps(pages))
    done = msrun.run_world(2, RUN_BLOCKS, tmp_path / "blocks.json", tmp_path, cwd=tmp_path, deadline_s=DEADLINE_S)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    faults = [fault for result in results for fault in result["faults"]]
    assert not faults, "\n".join(faults) + done.stderr
    reader = Reader(msrun, README, tmp_path)
    for page in doc_pages.pages():
        scripts = {block.file_name: block.place for block in doc_pages.blocks(page) if block.file_name}
        for block in doc_pages.blocks(page):
            if "printed by" in block.marks:
                shown = [line for line in block.text.splitlines() if not line.startswith(("$ ", "msrun"))]
                said = results[0]["printed"][scripts[block.marks["printed by"]]]
                faults += [f"{block.place}: {fault}" for fault in reader.differences([*shown, "..."], said)]
    assert not faults, "\n".join(faults)


def blocks_to_run(page, source):
    """Return a page's Python blocks, with their setups, for run_blocks.py, and write a file that has only their lines,
    each where it stands in the page: torch reads the files of what it captures as Python.

    Scripts that a command of the page runs are left out.
    """
    of_page = doc_pages.blocks(page)
    run = [block for block in of_page if block.is_run and block.language == "console"]
    commands = [line for block in run for line, _ in block.commands]
    found = []
    lines = []
    for block in of_page:
        is_command = block.file_name and any(block.file_name in line.split() for line in commands)
        if block.language != "python" or not block.is_run or is_command:
            continue
        setup = (block.setup_line, block.marks.get("setup", ""), "")
        for line, code, name in (setup, (block.line, block.text, block.file_name)):
            if code:
                lines += [""] * (line - 1 - len(lines))
                lines += code.splitlines()
                found.append({"place": block.place, "path": str(source), "line": line, "code": code, "name": name})
    source.parent.mkdir(exist_ok=True)
    source.write_text("\n".join(lines))
    return found
