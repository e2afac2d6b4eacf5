"""Draws pages of the built site in a headless browser, wide and narrow: `make docs-shoot` writes build/shots.

    python docs/shoot.py [--site build/site] [--out build/shots] [PAGE.html ...]

Needs chromium (`apt-get install chromium`), or another browser of that family in the environment variable BROWSER. Look
at the pictures for tables that are cut off, overlapping labels, and code without colors.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PAGES = (
    "index.html", "quickstart.html", "use.html", "works-with.html", "guides/memory.html", "troubleshooting.html",
    "api/sharding.html", "benchmarks.html",
)  # fmt: skip
WINDOWS = {"wide": (1280, 1600), "narrow": (500, 1400)}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_browser() -> str:
    """Returns the path of the browser, or ends the program with a message."""
    names = (os.environ["BROWSER"],) if os.environ.get("BROWSER") else BROWSERS
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        sys.exit(f"docs/shoot.py: none of {', '.join(names)} is on PATH: apt-get install chromium, or set BROWSER.")
    return found


def shoot(browser: str, page: Path, picture: Path, size: tuple[int, int]) -> None:
    """Writes a picture of the page in a window of this size in pixels."""
    with tempfile.TemporaryDirectory(prefix="shoot-") as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        command += [f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}", "--virtual-time-budget=5000"]
        command += [f"--screenshot={picture.resolve()}", page.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    if done.returncode != 0 or not picture.is_file():
        sys.exit(f"docs/shoot.py: {page} could not be drawn:\n{done.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", default=PAGES, help="below the folder of the site")
    parser.add_argument("--site", type=Path, default=Path("build/site"))
    parser.add_argument("--out", type=Path, default=Path("build/shots"))
    arguments = parser.parse_args()
    missing = [name for name in arguments.pages if not (arguments.site / name).is_file()]
    if missing:
        sys.exit(f"docs/shoot.py: {arguments.site} has no {', '.join(missing)}: make docs builds the site.")
    browser = find_browser()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.pages:
        for window, size in WINDOWS.items():
            picture = arguments.out / f"{name.removesuffix('.html').replace('/', '-')}-{window}.png"
            shoot(browser, arguments.site / name, picture, size)
            print(picture, flush=True)


if __name__ == "__main__":
    main()
