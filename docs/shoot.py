"""Draws pages of the built site in a headless browser, and checks that no page scrolls sideways: `make docs-shoot`.

    python docs/shoot.py [--site build/site] [--out build/shots] [PAGE.html ...]

Each page is drawn wide and narrow, light and dark. Look at the pictures for tables that are cut off, overlapping
labels, and code without colors. Without arguments, it checks all pages of the site and draws those of PAGES.

Needs `pip install playwright`, and chromium (`apt-get install chromium`) or another browser of that family in the
environment variable BROWSER.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

PAGES = (
    "index.html", "quickstart.html", "use.html", "works-with.html", "guides/memory.html", "troubleshooting.html",
    "api/sharding.html", "benchmarks.html", "how-it-works.html",
)  # fmt: skip
WINDOWS = {"wide": {"width": 1280, "height": 900}, "narrow": {"width": 400, "height": 800}}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# The page's own width, and the outermost elements that make it wider than the window.
OVERFLOW = """() => {
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return null;
  const sticksOut = (one) => one.getBoundingClientRect().right > width + 1;
  const all = [...document.querySelectorAll("article *")];
  const wide = all.filter((one) => sticksOut(one) && !sticksOut(one.parentElement));
  return wide.slice(0, 3).map((one) => one.tagName.toLowerCase() + ": " + one.textContent.trim().slice(0, 60));
}"""


def find_browser() -> str:
    """Returns the path of the browser, or ends the program with a message."""
    names = (os.environ["BROWSER"],) if os.environ.get("BROWSER") else BROWSERS
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        sys.exit(f"docs/shoot.py: none of {', '.join(names)} is on PATH: apt-get install chromium, or set BROWSER.")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", help="below the folder of the site")
    parser.add_argument("--site", type=Path, default=Path("build/site"))
    parser.add_argument("--out", type=Path, default=Path("build/shots"))
    arguments = parser.parse_args()
    drawn = set(arguments.pages or PAGES)
    every = {str(page.relative_to(arguments.site)) for page in arguments.site.rglob("*.html")}
    checked = drawn if arguments.pages else every
    missing = sorted(name for name in drawn if not (arguments.site / name).is_file())
    if missing:
        sys.exit(f"docs/shoot.py: {arguments.site} has no {', '.join(missing)}: make docs builds the site.")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("docs/shoot.py needs playwright: pip install playwright.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    num_wide = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        for window, size in WINDOWS.items():
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport=size, color_scheme=scheme)
                for name in sorted(drawn if scheme == "dark" else checked):
                    page.goto((arguments.site / name).resolve().as_uri())
                    if (wide := page.evaluate(OVERFLOW)) is not None:
                        print(f"{name} is too wide at {size['width']} pixels: {'; '.join(wide)}")
                        num_wide += 1
                    if name in drawn:
                        stem = name.removesuffix(".html").replace("/", "-")
                        page.screenshot(path=arguments.out / f"{stem}-{window}-{scheme}.png", full_page=True)
                page.close()
        browser.close()
    print(f"{len(checked)} pages checked, {len(drawn)} drawn into {arguments.out}")
    return int(num_wide > 0)


if __name__ == "__main__":
    sys.exit(main())
