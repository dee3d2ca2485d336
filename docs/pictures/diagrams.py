"""Draw processes.svg and weight_and_batch.svg.

python docs/pictures/diagrams.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent
LINE_HEIGHT = 17
STYLE = """\
  text { font: 13px system-ui, sans-serif; fill: #1f2328; }
  .title { font-weight: 600; }
  .note { fill: #57606a; font-size: 12px; }
  rect { fill: #f6f8fa; stroke: #57606a; rx: 6px; }
  .host { fill: none; stroke-dasharray: 5 4; }
  .strong { fill: #ddf4ff; stroke: #0969da; }
  path { stroke: #57606a; fill: none; marker-end: url(#head); }
  .dashed { stroke-dasharray: 4 3; }"""


@dataclass
class Drawing:
    """Boxes with lines of text, and arrows between points, on a white ground."""

    title: str
    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def box(self, x: int, y: int, width: int, height: int, *lines: str, kind: str = "") -> None:
        """Draw a rectangle; the first line is its title."""
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}"/>')
        for index, line in enumerate(lines):
            style = "note" if index else "title"
            self.text(x + 10, y + 20 + index * LINE_HEIGHT, line, style)

    def text(self, x: int, y: int, line: str, kind: str = "note") -> None:
        """Write a line; `y` is its base line."""
        self.parts.append(f'<text class="{kind}" x="{x}" y="{y}">{escape(line)}</text>')

    def arrow(self, *points: tuple[int, int], label: str = "", at: tuple[int, int] = (0, 0), kind: str = "") -> None:
        """Draw a line through points, with a head at the last one."""
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        self.parts.append(f'<path class="{kind}" d="{path}"/>')
        if label:
            self.text(*at, label)

    def between(self, x: int, top: int, bottom: int, label: str) -> None:
        """Draw a message between the two ranks, with its name."""
        middle = (top + bottom) // 2
        self.arrow((x, middle), (x, top), kind="dashed")
        self.arrow((x, middle), (x, bottom), label=label, at=(x + 8, middle + 4), kind="dashed")

    def save(self, name: str) -> None:
        """Write the picture beside this file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n<style>\n{STYLE}\n</style>\n"
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto">'
            '<polygon points="0,0 8,4 0,8" fill="#57606a"/></marker></defs>\n'
            f'<rect x="0" y="0" width="{self.width}" height="{self.height}" style="fill:#ffffff;stroke:none"/>\n'
        )
        (HERE / name).write_text(head + "\n".join(self.parts) + "\n</svg>\n", encoding="utf-8")


def draw_processes() -> None:
    """The processes of a job on one host, and of one on several."""
    drawing = Drawing("The processes of a job", 860, 560)
    drawing.text(20, 28, "One host", "title")
    drawing.box(20, 42, 820, 236, kind="host")
    drawing.box(40, 70, 200, 84, "msrun", "options, plan, supervision,", "console, report", kind="strong")
    drawing.box(320, 70, 200, 84, "fork server", "imports torch once, forks", "all processes of the job")
    for index, lines in enumerate(
        [("scheduler", "store for plain torch"), ("worker 0", "your script"), ("worker 1 ... n-1", "your script")]
    ):
        y = 56 + index * 72
        drawing.box(620, y, 200, 56, *lines)
        drawing.arrow((520, 100 + index * 18), (620, y + 28))
    drawing.arrow((240, 112), (320, 112), label="starts", at=(258, 104))
    drawing.text(548, 82, "forks")
    drawing.box(320, 206, 200, 56, "log_output/", "a file per worker")
    drawing.arrow((620, 240), (520, 240), label="stdout, stderr", at=(526, 258))
    drawing.arrow((320, 234), (140, 234), (140, 154), label="shows rank 0", at=(150, 226))

    drawing.text(20, 312, "Several hosts", "title")
    drawing.box(20, 326, 820, 220, kind="host")
    drawing.box(40, 380, 200, 84, "msrun --hosts", "plan, console, report,", "logs of all hosts", kind="strong")
    for index, processes in enumerate(["scheduler, workers 0-7", "workers 8-15"]):
        y = 338 + index * 102
        drawing.box(400, y, 424, 92, f"host {index}", kind="host")
        drawing.box(416, y + 30, 110, 52, "agent")
        drawing.box(590, y + 30, 220, 52, "fork server", processes)
        drawing.arrow((526, y + 56), (590, y + 56))
        drawing.arrow((240, 412 + 20 * index), (416, y + 56))
    drawing.text(40, 490, "one SSH connection per host:")
    drawing.text(40, 508, "heartbeat, failure, restart, logs")
    drawing.arrow((700, 470), (700, 420), kind="dashed", label="store, gloo, NCCL", at=(708, 452))
    drawing.save("processes.svg")


def draw_weight_and_batch() -> None:
    """What happens to a weight and to a batch in one training step on two ranks."""
    drawing = Drawing("The way of a weight and of a batch", 860, 510)
    steps = (
        ("1 capture", "network and loss:", "one graph, guards"),
        ("2 decide", "strategies, layouts,", "collectives"),
        ("3 lower", "local graph and", "passes over it"),
        ("4 run", "local tensors,", "explicit collectives"),
    )
    for index, lines in enumerate(steps):
        x = 20 + index * 212
        drawing.box(x, 20, 184, 70, *lines, kind="strong")
        if index:
            drawing.arrow((x - 28, 55), (x, 55))
    drawing.text(20, 124, "A weight of 512 x 784, cut in two by hsdp", "title")
    weight = (
        ("initial values", "those of one", "process"),
        ("part at rest", "256 x 784", "on each rank"),
        ("forward", "gathered, used,", "freed"),
        ("gradient", "reduced into", "the same part"),
        ("optimizer", "updates", "the part"),
    )
    for rank in (0, 1):
        y = 138 + rank * 92
        for index, lines in enumerate(weight):
            x = 76 + index * 156
            drawing.box(x, y, 136, 70, *lines)
            if index:
                drawing.arrow((x - 20, y + 35), (x, y + 35))
        drawing.text(20, y + 40, f"rank {rank}", "title")
    drawing.between(456, 208, 230, "all_gather")
    drawing.between(612, 208, 230, "reduce_scatter")
    drawing.text(20, 344, "A batch of 64 rows", "title")
    batch = (
        ("copies, micro batches", "divide the rows further"),
        ("sum and count", "of the losses"),
        ("loss", "the global mean"),
    )
    for rank in (0, 1):
        y = 358 + rank * 78
        for index, lines in enumerate([("own rows", f"{32 * rank}-{32 * rank + 31}"), *batch]):
            x = 76 + index * 196
            drawing.box(x, y, 172, 56, *lines)
            if index:
                drawing.arrow((x - 24, y + 28), (x, y + 28))
        drawing.text(20, y + 33, f"rank {rank}", "title")
    drawing.between(554, 414, 436, "all_reduce")
    drawing.save("weight_and_batch.svg")


if __name__ == "__main__":
    draw_processes()
    draw_weight_and_batch()
