"""book/figures.py, on the ipywidgets installed and on 7.7.1, which Colab has (see test_colab_widgets)."""

import base64
import os
import re
import subprocess
import sys
import time

import ipywidgets
import matplotlib
import numpy as np
import pytest
import torch

matplotlib.use("agg")

from book import figures  # noqa: E402
from tools.notebooks import ROOT  # noqa: E402

LINKED = hasattr(ipywidgets, "Stack")


@pytest.fixture
def shown(monkeypatch):
    """What the code under test displays: a list of (bundle, metadata)."""
    bundles = []
    monkeypatch.setattr(figures, "display", lambda bundle, raw, metadata=None: bundles.append((bundle, metadata)))
    return bundles


def draw(**choices):
    figure, ax = figures.plt.subplots(figsize=(4, 2))
    ax.set(title=str(choices))
    return figure, f"chosen: {choices}"


def widgets():
    return ipywidgets.widgets.widget._instances if LINKED else ipywidgets.Widget.widgets


def widget(bundle):
    return widgets()[bundle["application/vnd.jupyter.widget-view+json"]["model_id"]]


def descendants(parent, kind):
    found = [parent] if isinstance(parent, kind) else []
    for child in getattr(parent, "children", ()):
        found += descendants(child, kind)
    return found


def links():
    return [w for w in widgets().values() if isinstance(w, ipywidgets.widgets.widget_link.Link)]


def follow(parent):
    """Bring the links up to date as the browser would."""
    for link in links():
        if isinstance(link, ipywidgets.widgets.widget_link.DirectionalLink):
            setattr(*link.target, getattr(*link.source))


def visible(parent) -> str:
    """The alt text of the picture that the reader sees."""
    if isinstance(parent, ipywidgets.HTML):
        return re.search(r'alt="([^"]*)"', parent.value)[1]
    if LINKED and isinstance(parent, ipywidgets.Stack):
        return visible(parent.children[parent.selected_index])
    return visible(parent.children[-1])


@pytest.mark.parametrize("choices", [{"a": [1, 2, 3]}, {"a": [1, 2], "b": ["x", "y", "z"]},
                                     {"a": [1, 2], "b": {"low": 0.1, "high": 0.9}, "c": [True, False]}])
def test_every_position_of_the_sliders_shows_its_own_frame(shown, choices):
    figures.explore(draw, **choices)
    box = widget(shown[0][0])
    sliders = descendants(box, ipywidgets.SelectionSlider)
    assert [slider.description for slider in sliders] == list(choices)
    values = [list(v.values()) if isinstance(v, dict) else v for v in choices.values()]
    for position in np.ndindex(*map(len, values)):
        for slider, index in zip(sliders, position):
            slider.index = index
        follow(box)
        expected = dict(zip(choices, (v[i] for v, i in zip(values, position))))
        assert visible(box) == f"chosen: {expected}".replace("'", "&#x27;")


def test_the_bundle_has_a_stable_line_and_where_it_helps_a_picture(shown):
    figures.explore(draw, a=[1, 2], b=[3])
    bundle, _ = shown[0]
    assert bundle["text/plain"] == "Interactive figure: 2 frames over a, b"
    assert ("image/png" in bundle) == LINKED  # Colab might prefer the picture to the live widget
    frames = descendants(widget(bundle), ipywidgets.HTML)
    png = base64.b64decode(re.search(r"base64,([^\"]+)", frames[0].value)[1])
    assert png.startswith(b"\x89PNG")


def test_play_drives_its_slider(shown):
    figures.explore(draw, play="b", a=[1], b=[1, 2, 3])
    play, = descendants(widget(shown[0][0]), ipywidgets.Play)
    assert (play.min, play.max) == (0, 2)
    assert any(link.source[0] is play and link.target[0].description == "b" for link in links())


def no_figure(a):
    return "a chart"


def no_alt(a):
    return draw(a=a)[0]


def empty_alt(a):
    return draw(a=a)[0], " "


def heavy(a):
    figure, ax = figures.plt.subplots(figsize=(8, 8))
    ax.imshow(np.random.default_rng(a).random((900, 900, 3)), interpolation="nearest")
    return figure, f"noise {a}"


@pytest.mark.parametrize("arguments, message", [
    ({"draw": no_figure, "a": [1]}, "must return a figure and its alt text, got 'a chart'"),
    ({"draw": no_alt, "a": [1]}, "must return a figure and its alt text"),
    ({"draw": empty_alt, "a": [1]}, "must return a figure and its alt text"),
    ({"draw": draw, "a": [1], "b": []}, "'b' has no values"), ({"draw": draw}, "at least one choice"),
    ({"draw": draw, "a": range(41)}, "at most 40 combinations of choices, got 41"),
    ({"draw": draw, "a": range(7), "b": range(6)}, "got 42"), ({"draw": draw, "a": [1], "play": "c"}, "play 'c'"),
    ({"draw": heavy, "a": [1, 2]}, "at most 400,000")])
def test_a_wrong_call_is_an_error_that_says_what_came(shown, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        figures.explore(**arguments)
    assert not shown and not figures.plt.get_fignums()


def test_show_gives_a_picture_with_its_alt_text_and_closes_the_figure(shown):
    figures.plt.plot([1, 2])
    figures.show("a rising line")
    bundle, metadata = shown[0]
    assert bundle["text/plain"] == "Figure: a rising line" and metadata == {"image/png": {"alt": "a rising line"}}
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG") and not figures.plt.get_fignums()
    with pytest.raises(ValueError, match="alt must be a text"):
        figures.show("")


def test_the_same_figure_gives_the_same_bytes():
    assert figures.picture(draw(a=1)[0], 100) == figures.picture(draw(a=1)[0], 100)


def test_a_picture_keeps_the_colours_of_its_lines():
    figure, ax = figures.plt.subplots()
    for color in figures.COLORS.values():
        ax.plot([0, 1], color=color, linewidth=6)
    image = figures.Image.open(figures.io.BytesIO(base64.b64decode(figures.picture(figure, 100)))).convert("RGB")
    kept = {"#%02x%02x%02x" % colour for _, colour in image.getcolors()}
    assert {"#ffffff", list(figures.COLORS.values())[-1]} <= kept


def test_a_heat_map_has_queries_in_rows_and_keys_in_columns():
    ax = figures.heatmap(np.array([[0.1, 0.2, 0.7], [0.5, 0.5, 0.0]]), ["q1", "q2"], ["k1", "k2", "k3"])
    assert [t.get_text() for t in ax.get_yticklabels()] == ["q1", "q2"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["k1", "k2", "k3"]
    assert "query" in ax.get_ylabel() and "key" in ax.get_xlabel()
    first_row = [t.get_text() for t in ax.texts if abs(t.get_position()[1] - 0.5) < 0.01]
    assert first_row == ["0.10", "0.20", "0.70"]
    with pytest.raises(ValueError, match=r"\(3 queries, 2 keys\), got \(2, 3\)"):
        figures.heatmap(np.zeros((2, 3)), ["a", "b", "c"], ["d", "e"])
    figures.plt.close("all")


def test_show_without_a_figure_is_refused(shown):
    figures.plt.close("all")
    for figure in (None, 1):
        with pytest.raises(ValueError, match="needs a figure"):
            figures.show("nothing at all", figure)


def test_many_combinations_are_counted_before_they_are_made(shown):
    with pytest.raises(ValueError, match="got 1000000000000"):
        figures.explore(draw, a=range(10**6), b=range(10**6))


def test_a_dollar_may_be_a_token_and_half_precision_may_be_drawn(shown):
    ax = figures.heatmap(torch.ones(1, 2, dtype=torch.bfloat16), ["$"], ["$a_$", "b"])
    figures.show("a heat map of two weights", ax.figure)


def test_the_clock_calls_in_turn_after_warming_up_and_gives_the_threads_back():
    called, threads = [], torch.get_num_threads()

    def slow(x):
        called.append(("slow", x, torch.get_num_threads()))
        time.sleep(0.02)

    def fast(x):
        called.append(("fast", x, torch.get_num_threads()))

    seconds = figures.clock([slow, fast], 7, repeats=3)
    assert called == [("slow", 7, 1), ("fast", 7, 1)] * 4
    assert seconds[0] > 0.015 > seconds[1]
    assert torch.get_num_threads() == threads
    with pytest.raises(ZeroDivisionError):
        figures.clock([lambda: 1 / 0])
    assert torch.get_num_threads() == threads


@pytest.mark.skipif(not LINKED, reason="this is the other environment")
def test_colab_widgets():
    """All of the above once more, with the ipywidgets 7.7.1 and the IPython 7.34 of Colab laid over this environment."""
    overlay = ROOT / ".venv" / "colab"
    assert (overlay / "ipywidgets").is_dir(), "make test installs tests/colab.txt into .venv/colab"
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", __file__], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(overlay)})
    assert done.returncode == 0, done.stdout[-3000:]
    assert "22 passed, 1 skipped" in done.stdout
