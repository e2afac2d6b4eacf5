"""Prints the requirements of the named extras of pyproject.toml, one a line, for `pip install -r`."""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    pyproject = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    extras = pyproject["project"]["optional-dependencies"]
    for name in sys.argv[1:]:
        print("\n".join(extras[name]))


if __name__ == "__main__":
    main()
