"""Records commands in a terminal as a picture: `python docs/record.py`, in a checkout with `make build`.

It runs the files of quickstart.md on a pseudo terminal, as a reader would, and writes docs/assets/train.svg. Lines
light up at the pace of the run, faster than they did. They are legible before, so that a printed page shows them.
"""

from __future__ import annotations

import fcntl
import html
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs/assets/train.svg"
FILES = ("make_model.py", "run.yaml", "make_text.py")
COMMANDS = (
    "fsdp2x plan run.yaml --device cpu --memory 1GiB",
    "fsdp2x train run.yaml train.steps=40 logging.every=8",
    "fsdp2x export out exported",
)
COLUMNS = 112
SECONDS = 8.0  # of the animation
FONT, LINE, PAD = 13, 19, 16  # pixels
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def fences(page: str) -> dict[str, str]:
    """Returns the titled files of a page."""
    found = re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', page, flags=re.MULTILINE | re.DOTALL)
    return dict(found)


def record(command: str, folder: Path) -> list[tuple[float, str]]:
    """Runs the command on a terminal. Returns when each line got its last text, and the text."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TERM": "xterm"}
    process = subprocess.Popen(
        command.split(), cwd=folder, stdin=side, stdout=side, stderr=side, env=environment, close_fds=True
    )
    os.close(side)
    start, lines, times = time.monotonic(), [""], [0.0]
    while True:
        try:
            data = os.read(main, 65536)
        except OSError:  # the last process has closed the terminal
            break
        if not data:
            break
        for part in re.split(r"(\r\n|\n|\r)", ESCAPE.sub("", data.decode(errors="replace"))):
            if part in ("\r\n", "\n"):
                lines.append("")
                times.append(0.0)
            elif part == "\r":
                lines[-1] = ""  # a progress bar writes its line again
            elif part:
                lines[-1] += part
                times[-1] = time.monotonic() - start
    os.close(main)
    if process.wait() != 0:
        sys.exit(f"docs/record.py: {command} failed:\n" + "\n".join(lines))
    return [(at, line.rstrip()[:COLUMNS]) for at, line in zip(times, lines, strict=True) if line.strip()]


def draw(screen: list[tuple[float, str]]) -> str:
    """Returns the SVG of lines that light up at their seconds."""
    width, height = round(COLUMNS * FONT * 0.602) + 2 * PAD, len(screen) * LINE + 2 * PAD
    texts = []
    for index, (at, line) in enumerate(screen):
        kind = ' class="c"' if line.startswith("$ ") else ""
        texts.append(
            f'<text x="{PAD}" y="{PAD + FONT + index * LINE}"{kind} style="animation-delay:{at:.2f}s">'
            f"{html.escape(line)}</text>"
        )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">
<title>A terminal that plans, trains, and exports a model with fsdp2x</title>
<style>
text {{ font: {FONT}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #d7dae0; white-space: pre; \
animation: show .01s both }}
.c {{ fill: #7ee787; font-weight: 600 }}
@keyframes show {{ from {{ opacity: .4 }} }}
@media (prefers-reduced-motion: reduce) {{ text {{ animation: none }} }}
</style>
<rect width="100%" height="100%" rx="8" fill="#1e2127"/>
{chr(10).join(texts)}
</svg>
"""


def main() -> int:
    files = fences((ROOT / "docs/quickstart.md").read_text())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title in FILES:
            (folder / title).write_text(files[title])
        for title in FILES:
            if title.endswith(".py"):
                subprocess.run([sys.executable, title], cwd=folder, check=True, capture_output=True, timeout=300)
        screen: list[tuple[float, str]] = []
        for command in COMMANDS:
            before = screen[-1][0] if screen else 0.0
            screen += [(before, f"$ {command}")]
            screen += [(before + at, line) for at, line in record(command, folder)]
    scale = SECONDS / max(screen[-1][0], 1e-3)
    TARGET.write_text(draw([(at * scale, line) for at, line in screen]))
    print(f"{TARGET.relative_to(ROOT)}: {len(screen)} lines, {TARGET.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
