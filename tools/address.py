"""Write the repository's and the site's address, which stand in _config.yml, into every file that links to them."""

import argparse
import re
from pathlib import Path

import yaml

from tools.notebooks import ROOT, ToolError, chapters, command, read, write, write_text

TEXTS = ("README.md", "CITATION.cff")
RAW = re.compile(r"(https://raw\.githubusercontent\.com)/[^/\s]+/[^/\s]+/(?=main/book/)")  # where chapters fetch files of ours


def addresses(root: Path = ROOT) -> tuple[str, str]:
    """(the repository's address, the site's address), both without a slash at the end."""
    try:
        config = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))
        return config["repository"]["url"].rstrip("/").removesuffix(".git"), config["sphinx"]["config"]["html_baseurl"].rstrip("/")
    except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise ToolError(f"_config.yml must have repository: url and sphinx: config: html_baseurl ({error!r})") from None


def rewrite(text: str, repository: str, site: str) -> str:
    """The text with our addresses brought up to date. They are known by their form, whatever the host and owner."""
    owner_and_name = "/".join(repository.split("/")[-2:])
    text = re.sub(r"https://[^\s)>\"']+?/(?=(?:index|book/\d\d_\w+)\.html)", site + "/", text)
    text = re.sub(r"(https://colab\.research\.google\.com/github)/[^/\s]+/[^/\s]+/", rf"\1/{owner_and_name}/", text)
    text = RAW.sub(rf"\1/{owner_and_name}/", text)
    text = re.sub(r"(?<=git clone )https://\S+?\.git", repository + ".git", text)
    text = re.sub(r"(?m)^(repository-code: ).*$", rf"\g<1>{repository}", text)
    return re.sub(r"(?m)^(url: ).*$", rf"\g<1>{site}/", text)


def update(root: Path = ROOT, check: bool = False) -> list[str]:
    """Bring addresses up to date in the chapters and in README.md and CITATION.cff; returns what changed."""
    repository, site = addresses(root)
    changed = []
    for path in chapters(root / "book"):
        notebook = read(path)
        stale = [cell for cell in notebook.cells if rewrite(cell.source, repository, site) != cell.source]
        for cell in stale:
            cell.source = rewrite(cell.source, repository, site)
        if stale:
            changed.append(path.name)
            if not check:
                write(path, notebook)
    for path in (root / name for name in TEXTS):
        text = path.read_text(encoding="utf-8")
        if rewrite(text, repository, site) != text:
            changed.append(path.name)
            if not check:
                write_text(path, rewrite(text, repository, site))
    return changed


def run(arguments: argparse.Namespace) -> int:
    changed = update(check=arguments.check)
    for name in changed:
        print(f"{name}: {'old addresses; run make weave' if arguments.check else 'addresses written'}")
    return 1 if arguments.check and changed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if an address is old")
    command(run, parser)
