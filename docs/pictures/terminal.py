"""Run the script of tutorials/failing_job.md under msrun and save what the terminal shows as failing_job.svg.

python docs/pictures/terminal.py
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

HERE = Path(__file__).resolve().parent
TUTORIAL = HERE.parent / "tutorials" / "failing_job.md"
SCRIPT = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = "msrun --worker_num 4 train.py"
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


def shown_on_a_terminal(words: list[str], folder: Path) -> str:
    """Return what a command writes to a terminal; it may fail.

    Raises:
        OSError: there is no such command, or no terminal to be had.
    """
    terminal, end = pty.openpty()
    process = subprocess.Popen(words, cwd=folder, stdin=end, stdout=end, stderr=end)
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


def main() -> None:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "job")
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT.findall(TUTORIAL.read_text(encoding="utf-8"))[0], encoding="utf-8")
        text = shown_on_a_terminal(COMMAND.split(), folder).replace(str(folder), "/home/you/job")
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text.assemble(("$ ", "green"), (COMMAND, "bold")))
        for line in text.splitlines():
            styled = Text.from_ansi(line)
            styled.highlight_regex(r"^msrun: error:", "bold red")
            styled.highlight_regex(r"\w+Error: .*$", "bold")
            console.print(styled)
        picture = console.export_svg(title="a failing job", theme=THEME, unique_id="failing_job")
    (HERE / "failing_job.svg").write_text(FONT_FACES.sub("", picture), encoding="utf-8")


if __name__ == "__main__":
    main()
