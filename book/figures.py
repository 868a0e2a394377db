"""The book's figures: one style, the same colours everywhere, heat maps, pictures with sliders; and its clock."""

import base64
import html
import io
import itertools
import math
import time

import ipywidgets
import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
import torch
from IPython.display import display
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

# Okabe and Ito's palette, which colour-blind readers can tell apart. Each role keeps its colour through the book.
COLORS = {"query": "#0072B2", "key": "#D55E00", "value": "#009E73", "encoder": "#56B4E9", "decoder": "#CC79A7",
          "neutral": "#555555"}
LINES = [("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"), ("#333333", (0, (5, 1, 1, 1, 1, 1)))]
WEIGHTS, SIGNED = "Blues", "RdBu_r"  # colour maps: weights from 0 to 1; values of both signs

sns.set_theme(context="notebook", style="ticks", font_scale=0.95, rc={
    "figure.figsize": (7, 3.2), "figure.dpi": 144, "figure.constrained_layout.use": True, "figure.facecolor": "white",
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "axes.titleweight": "bold",
    "axes.prop_cycle": plt.cycler(color=[c for c, _ in LINES], linestyle=[s for _, s in LINES]),
    "lines.linewidth": 2, "legend.frameon": False, "font.family": "DejaVu Sans"})


def picture(figure, dpi, colors=48):
    """A figure as a base64 PNG with a palette of its `colors` commonest colours, which keeps it small; closes it."""
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(dpi)
    canvas.draw()
    red, green, blue, _ = np.moveaxis(np.asarray(canvas.buffer_rgba()).astype(np.int32), -1, 0)
    plt.close(figure)
    present, pixels, counts = np.unique(red << 16 | green << 8 | blue, return_inverse=True, return_counts=True)
    present = np.stack([present >> 16, present >> 8 & 255, present & 255], axis=-1)
    palette = present[np.argsort(-counts, kind="stable")[:colors]]
    nearest = ((present[:, None] - palette) ** 2).sum(axis=-1).argmin(axis=-1)
    image = Image.fromarray(nearest[pixels].reshape(red.shape).astype(np.uint8), mode="P")
    image.putpalette(palette.astype(np.uint8).tobytes())
    data = io.BytesIO()
    image.save(data, format="png", optimize=True)
    return base64.b64encode(data.getvalue()).decode()


def show(alt, figure=None):
    """Show the figure (None: the current one) with `alt`, the text that says in words what it shows.

    Raises ValueError if the text is empty or there is no figure.
    """
    if not isinstance(alt, str) or not alt.strip():
        raise ValueError(f"alt must be a text that says what the figure shows, got {alt!r}")
    figure = figure or (plt.gcf() if plt.get_fignums() else None)
    if not isinstance(figure, Figure):
        raise ValueError(f"show needs a figure that was drawn, got {figure!r}")
    data = picture(figure, dpi=144, colors=256)
    display({"image/png": data, "text/plain": f"Figure: {alt}"}, raw=True, metadata={"image/png": {"alt": alt}})


def heatmap(values, queries, keys, *, ax=None, signed=False, annotate=True, title=""):
    """Draw values (T, S): a row for each of the T queries, a column for each of the S keys, their tokens on the axes.

    Weights run from 0 to 1; `signed` values are centred on 0. Returns the axes.
    Raises ValueError if the tokens do not fit the shape of the values.
    """
    if tuple(values.shape) != (len(queries), len(keys)):
        raise ValueError(f"values must be ({len(queries)} queries, {len(keys)} keys), got {tuple(values.shape)}")
    values = values.detach().float().cpu().numpy() if hasattr(values, "detach") else values
    limit = abs(values).max() if signed else 1.0
    queries, keys = ([str(token).replace("$", r"\$") for token in tokens] for tokens in (queries, keys))  # no formulas
    ax = sns.heatmap(values, vmin=-limit if signed else 0, vmax=limit, cmap=SIGNED if signed else WEIGHTS, square=True,
                     annot=annotate, fmt=".2f", annot_kws={"size": 9}, linewidths=0.5, linecolor="white",
                     xticklabels=keys, yticklabels=queries, cbar=False, ax=ax)
    ax.set(xlabel="key: who is looked at", ylabel="query: who looks", title=title)
    ax.tick_params(length=0)
    ax.tick_params(axis="y", rotation=0)
    return ax


def clock(functions, *inputs, repeats=9):
    """The median time in seconds that each function takes on the inputs.

    They are called in turn, so that all meet the same moments of the machine, after one round to warm up; and on one
    thread, since threads that wait for one another would be timed, too.
    """
    functions, threads = list(functions), torch.get_num_threads()
    taken = [[] for _ in functions]
    torch.set_num_threads(1)
    try:
        for _ in range(1 + repeats):
            for function, times in zip(functions, taken):
                begin = time.perf_counter()
                function(*inputs)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
    return [float(np.median(times[1:])) for times in taken]


def explore(draw, *, play=None, **choices):
    """Show `draw` for every combination of the choices, with a slider for each choice.

    All frames are drawn now, and sliders and frames are linked in the browser: they move without a kernel, too.
    draw     called with one value of each choice, by name; returns a matplotlib figure and its alt text
    choices  name=[values] or name={label: value}; at most 40 combinations in all
    play     the name of a choice whose slider gets a play button
    Raises ValueError for a choice without values, too many combinations, frames of more than 400 kB in all, an
    unknown `play`, or a `draw` that returns anything else.
    """
    if not choices or play not in (None, *choices):
        raise ValueError(f"explore needs at least one choice, and play must name one of them; got choices "
                         f"{list(choices)}, play {play!r}")
    choices = {name: values if isinstance(values, dict) else list(values) for name, values in choices.items()}
    empty = [name for name, values in choices.items() if len(values) == 0]
    if empty:
        raise ValueError(f"choice {empty[0]!r} has no values")
    count = math.prod(map(len, choices.values()))
    if count > 40:
        raise ValueError(f"at most 40 combinations of choices, got {count}")
    options = [[str(label) for label in values] for values in choices.values()]
    values = [list(v.values()) if isinstance(v, dict) else list(v) for v in choices.values()]

    pictures, frames = [], []
    for combination in itertools.product(*values):
        result = draw(**dict(zip(choices, combination)))
        figure, alt = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(figure, Figure) or not isinstance(alt, str) or not alt.strip():
            plt.close(figure if isinstance(figure, Figure) else None)
            raise ValueError(f"draw must return a figure and its alt text, got {result!r}")
        width, height = (round(100 * inches) for inches in figure.get_size_inches())
        pictures.append(picture(figure, dpi=120))
        frames.append(f'<img src="data:image/png;base64,{pictures[-1]}" alt="{html.escape(alt)}" width="{width}" '
                      f'height="{height}" style="max-width:100%;height:auto;background:white">')
    weight = sum(map(len, frames))
    if weight > 400_000:
        raise ValueError(f"the frames weigh {weight:,} bytes; at most 400,000. Draw fewer or plainer ones")

    sliders = [ipywidgets.SelectionSlider(options=labels, description=name, style={"description_width": "initial"},
                                          layout={"flex": "1 1 240px", "width": "auto", "max_width": "520px"})
               for name, labels in zip(choices, options)]
    rows = [ipywidgets.HBox([slider], layout={"flex_flow": "row wrap"}) for slider in sliders]
    if play:
        index = list(choices).index(play)
        button = ipywidgets.Play(min=0, max=len(options[index]) - 1, interval=1000)
        ipywidgets.jslink((button, "value"), (sliders[index], "index"))
        rows[index].children += (button,)
    bundle = {"text/plain": f"Interactive figure: {len(frames)} frames over {', '.join(choices)}"}
    if hasattr(ipywidgets, "Stack"):
        view = _nest(frames, sliders)
        bundle["image/png"] = pictures[0]  # stands in where widgets cannot show
    else:  # ipywidgets 7, as in Colab: the kernel moves the picture
        view = ipywidgets.HTML(frames[0])

        def update(_):
            position = 0
            for slider, labels in zip(sliders, options):
                position = position * len(labels) + slider.index
            view.value = frames[position]

        for slider in sliders:
            slider.observe(update, "index")
    box = ipywidgets.VBox([*rows, view])
    bundle["application/vnd.jupyter.widget-view+json"] = {"version_major": 2, "version_minor": 0,
                                                          "model_id": box.model_id}
    display(bundle, raw=True)


def _nest(frames, sliders):
    """Stacks within stacks, one level for each slider, linked to it in the browser."""
    if not sliders:
        return ipywidgets.HTML(frames[0])
    step = len(frames) // len(sliders[0].options)
    stack = ipywidgets.Stack([_nest(frames[i:i + step], sliders[1:]) for i in range(0, len(frames), step)],
                             selected_index=0)
    ipywidgets.jsdlink((sliders[0], "index"), (stack, "selected_index"))
    return stack
