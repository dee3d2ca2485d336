"""Run jobs under msrun and save what the terminal shows: failing_job.svg, running_job.svg, plan.svg.

python docs/pictures/terminal.py
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

HERE = Path(__file__).resolve().parent
SCRIPT = re.compile(r"^<!-- file: train.py -->\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PICTURES = {
    # name: title, page that has train.py, commands that are not shown, the command that is
    "failing_job": ("a failing job", "tutorials/first_job.md", (), "msrun --worker_num 4 train.py"),
    "running_job": (
        "a running job",
        "how-to/watch_a_job.md",
        ("msrun --worker_num 4 --join=False --quiet train.py", "sleep 2.5"),
        "msrun status",
    ),
    "plan": (
        "a plan",
        "tutorials/first_job.md",
        (),
        "msrun --rehearse 2x2 --dry_run train.py | grep -vE '=|environment|note'",
    ),
}
COLUMNS = 96
STATUS_LINE = re.compile(r"[^\n]*\r\x1b\[K")
"""What msrun shows for a moment and then erases."""
FONT_FACES = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
"""rich names fonts of another site; a page that forbids that shows the same monospaced font without them."""
THEME = TerminalTheme(
    (16, 20, 24),
    (214, 218, 222),
    [(16, 20, 24), (240, 110, 110), (120, 200, 130), (230, 200, 110), (110, 160, 240), (200, 130, 220), (90, 200, 210)],
)


def shown_on_a_terminal(command: str, folder: Path) -> str:
    """Return what a command writes to a terminal; it may fail.

    Raises:
        OSError: there is no terminal to be had.
    """
    terminal, end = pty.openpty()
    process = subprocess.Popen(["bash", "-c", command], cwd=folder, stdin=end, stdout=end, stderr=end)
    os.close(end)
    parts = []
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # Linux says EIO when nobody has the other end any more
            break
        if not part:
            break
        parts.append(part)
    process.wait()
    os.close(terminal)
    return STATUS_LINE.sub("", b"".join(parts).decode().replace("\r\n", "\n"))


def draw(name: str, title: str, page: str, before: tuple[str, ...], command: str) -> None:
    """Write a picture."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "job")
        folder.mkdir()
        script = SCRIPT.findall((HERE.parent / page).read_text(encoding="utf-8"))[0]
        (folder / "train.py").write_text(script, encoding="utf-8")
        for earlier in before:
            shown_on_a_terminal(earlier, folder)
        text = shown_on_a_terminal(command, folder)
        text = text.replace(str(folder), "/home/you/job").replace(sys.executable, "/home/you/.venv/bin/python")
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text.assemble(("$ ", "green"), (command, "bold")))
        for line in text.splitlines():
            styled = Text.from_ansi(line)
            styled.highlight_regex(r"^msrun: error:", "bold red")
            styled.highlight_regex(r"\w+Error: .*$", "bold")
            console.print(styled)
        picture = console.export_svg(title=title, theme=THEME, unique_id=name)
    (HERE / f"{name}.svg").write_text(FONT_FACES.sub("", picture), encoding="utf-8")


if __name__ == "__main__":
    for picture, settings in PICTURES.items():
        draw(picture, *settings)
