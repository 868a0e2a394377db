"""Draw the logo, the favicon and the social card: a small causal attention matrix, cell by cell."""

import argparse

from tools.notebooks import ROOT, command, write_text

STATIC = ROOT / "book" / "static"
WEIGHTS = ((1.0,), (0.35, 0.65), (0.15, 0.25, 0.6), (0.5, 0.1, 0.1, 0.3))  # a row for each query; each sums to 1
BLUE, ORANGE = (0, 114, 178), (213, 94, 0)


def colour(weight: float) -> str:
    """From pale to full blue; the strongest look-back is orange."""
    if weight == 0.5:
        return "#%02x%02x%02x" % ORANGE
    return "#%02x%02x%02x" % tuple(round(255 - (255 - part) * (0.25 + 0.75 * weight)) for part in BLUE)


def cells(size: float, gap: float) -> list[tuple[float, float, float, str]]:
    """The matrix as squares (x, y, side, colour) in a box of `size`."""
    side = (size - 3 * gap) / 4
    return [(column * (side + gap), row * (side + gap), side, colour(weight))
            for row, weights in enumerate(WEIGHTS) for column, weight in enumerate(weights)]


def svg() -> str:
    squares = "".join(f'<rect x="{x:g}" y="{y:g}" width="{side:g}" height="{side:g}" rx="2" fill="{fill}"/>'
                      for x, y, side, fill in cells(64, 4))
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64"><title>Attention, Cell by Cell</title>{squares}</svg>\n'


def card() -> None:
    """The picture (1200 by 630 pixels) that other sites show beside a link to this one."""
    import matplotlib.pyplot as plt
    figure = plt.figure(figsize=(12, 6.3), dpi=100, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 1200), ylim=(630, 0))
    axes.axis("off")
    for x, y, side, fill in cells(330, 18):
        axes.add_patch(plt.Rectangle((90 + x, 150 + y), side, side, color=fill, linewidth=0))
    axes.text(490, 235, "Attention,", size=52, weight="bold", va="center", color="#222222")
    axes.text(490, 325, "Cell by Cell", size=52, weight="bold", va="center", color="#222222")
    axes.text(490, 420, "The Transformer, built and measured\nin notebooks that run", size=25, va="center",
              color="#444444", linespacing=1.4)
    figure.savefig(STATIC / "card.png", metadata={"Software": None})


def run(_) -> None:
    for name in ("logo.svg", "favicon.svg"):
        write_text(STATIC / name, svg())
    card()


if __name__ == "__main__":
    command(run, argparse.ArgumentParser(description=__doc__.splitlines()[0]))
