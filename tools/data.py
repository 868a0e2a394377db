"""Fetch what chapters 14 and 15 need, checked by its sums, into data/multi30k."""

import argparse

from tools.notebooks import ROOT, ToolError, command


def run(arguments: argparse.Namespace) -> None:
    from book.transformer import MULTI30K, MULTI30K_SUMS, fetch  # needs torch
    for name, digest in zip(MULTI30K_SUMS[::2], MULTI30K_SUMS[1::2]):
        try:
            fetch(f"{MULTI30K}{name}.gz", ROOT / "data" / "multi30k" / f"{name}.gz", digest)
        except OSError as error:
            raise ToolError(str(error)) from None
    print("data/multi30k: complete")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    command(run, parser)
