"""Build the site into _build/html; warnings are errors."""

import argparse
import subprocess
import sys
from pathlib import Path

from tools.notebooks import ROOT, ToolError, command
from tools.vendor import vendor


def build(source: Path = ROOT) -> str:
    """Build the site of `source`; returns what Jupyter Book said. Raises ToolError with its warnings."""
    if not Path(sys.executable).with_name("jupyter-book").exists():
        raise ToolError("jupyter-book is not installed beside this Python: run make book")
    done = subprocess.run([str(Path(sys.executable).with_name("jupyter-book")), "build", str(source), "--all", "-W", "--keep-going"],
                          cwd=ROOT, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode:
        warnings = [line for line in said.splitlines() if "WARNING" in line or "ERROR" in line]
        raise ToolError("the book has warnings:\n" + "\n".join(warnings or said.splitlines()[-20:]))
    return said


def run(_) -> None:
    vendor()
    build()
    print(f"The site is in {(ROOT / '_build' / 'html').relative_to(ROOT)}; open index.html there, or run make serve")


if __name__ == "__main__":
    command(run, argparse.ArgumentParser(description=__doc__.splitlines()[0]))
