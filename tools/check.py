"""Look through chapters for what a reader, a runner or a grader would trip over; runs nothing.

Each rule below is a function that yields what is wrong, in words, with the cell's number.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

from nbformat import NotebookNode

from tools.execute import fingerprints, last_fingerprint, widget_states
from tools.notebooks import (BOOK, WIDGET_VIEW, chapters, command, is_generated, outputs_text, parse, read, tags)

LINE = 78  # characters of code that the site shows without scrolling
WORDS = (1500, 3000)
IGNORED_SHARE = 0.15
FILE_BYTES = 3_000_000
ENDING = ["What you built", "Check yourself", "Where to read on"]
LEAKS = {  # Markdown that does not look alike in the book, Colab and GitHub
    "an image": r"!\[[^\]]*\]\(|<img\b",
    "a MyST directive": r"^\s*(?:`{3,}|~{3,}|:{3,})\{",
    "a colon fence": r"^\s*:{3,}",
    "a MyST role": r"\{[a-z:]+\}`",
    "a MyST comment or target": r"^(?:%|\([\w-]+\)=)",
    "a LaTeX bracket": r"(?<!\\)\\[\[(]",
    "a blank at an end of inline code, which no page shows": r"`\0",
    "an HTML tag other than details, summary, div, p": r"</?(?!details\b|summary\b|div\b|p\b|https?:)[a-zA-Z][^>\n]*>"}
PRIVATE = {  # what one machine or one day leaves in an output
    "a path": r"(?<![\w.:/<])/(?:[\w.-]+/)+[\w.-]+|[A-Z]:\\\w+",
    "a memory address": r"\b0x[0-9a-f]{6,}\b",
    "a date": r"\b20\d\d-\d\d-\d\d\b"}


def code_cells(notebook: NotebookNode) -> list[tuple[int, NotebookNode]]:
    """The code cells that have code, with their numbers."""
    return [(i, cell) for i, cell in enumerate(notebook.cells, start=1)
            if cell.cell_type == "code" and cell.source.strip()]


def written(notebook: NotebookNode) -> list[tuple[int, NotebookNode]]:
    """The code cells that people wrote."""
    return [(i, cell) for i, cell in code_cells(notebook) if not is_generated(cell)]


def prose(notebook: NotebookNode) -> list[tuple[int, str]]:
    """The Markdown cells without their code blocks and inline code."""
    fenced, inline = r"(?ms)^```(?!\{).*?^```\s*?$", r"`([^`\n]+)`"
    return [(i, re.sub(inline, lambda m: "`" if m[1] == m[1].strip() else "`\0", re.sub(fenced, "", cell.source)))
            for i, cell in enumerate(notebook.cells, start=1) if cell.cell_type == "markdown"]


def executed(notebook: NotebookNode) -> Iterator[str]:
    """Every code cell was run, in order, from a fresh kernel, without an error or a warning."""
    for expected, (i, cell) in enumerate(code_cells(notebook), start=1):
        if cell.execution_count is None:
            yield f"cell {i} was never executed"
        elif cell.execution_count != expected:
            yield f"cell {i} was executed out of order ({cell.execution_count}, expected {expected})"
        for output in cell.outputs:
            if output.output_type == "error":
                yield f"cell {i} stores an error: {output.ename}"
            if output.output_type == "stream" and output.name == "stderr":
                yield f"cell {i} stores a warning: {output.text.strip()[:80]}"
    now = last_fingerprint(notebook)
    if notebook.metadata.get("fingerprint", now) != now:
        yield "the code has changed since its outputs were stored: run make execute"


def repeatable(notebook: NotebookNode) -> Iterator[str]:
    """Few outputs go uncompared; each of those cells asserts its claim, and was recorded from this code."""
    mine, prints = written(notebook), fingerprints(notebook)
    ignored = [(i, cell) for i, cell in mine if "nbval-ignore-output" in tags(cell)]
    if mine and len(ignored) / len(mine) > IGNORED_SHARE:
        yield f"{len(ignored)} of {len(mine)} code cells ignore their output; at most {IGNORED_SHARE:.0%} may"
    for i, cell in ignored:
        if not any(isinstance(node, ast.Assert) for node in ast.walk(parse(cell.source, f"cell {i}")[0])):
            yield f"cell {i} ignores its output but asserts nothing"
        if cell.metadata.get("fingerprint") != prints[cell.id]:
            yield f"cell {i} ignores its output, and that was recorded from other code"
    for i, cell in mine:
        text = outputs_text(cell.outputs)
        for what, pattern in PRIVATE.items():
            if re.search(pattern, text) and not (what == "a date" and "full-run" in tags(cell)):
                yield f"cell {i} prints {what}: {re.search(pattern, text)[0]}"


def pictured(notebook: NotebookNode) -> Iterator[str]:
    """Every picture is a PNG with a text that says what it shows; every widget has its state in the file."""
    states = widget_states(notebook)
    for i, cell in code_cells(notebook):
        data = [output.get("data", {}) for output in cell.outputs]
        if any("image/svg+xml" in d or "image/jpeg" in d for d in data):
            yield f"cell {i} stores a picture that is not a PNG"
        pictures = [d for d in data if "image/png" in d]
        if len(pictures) > 1:
            yield f"cell {i} stores {len(pictures)} pictures, and there is one alt text a cell"
        alt = (cell.metadata.get("mystnb") or {}).get("image", {}).get("alt", "")
        if pictures and len(alt.split()) < 5:
            yield f"cell {i}: a picture needs an alt text that says what it shows, got {alt!r}"
        for d in data:
            if WIDGET_VIEW in d and d[WIDGET_VIEW]["model_id"] not in states:
                yield f"cell {i}: the widget's state is not in the file"
            if WIDGET_VIEW in d and "image/png" not in d:
                yield f"cell {i}: the widget has no picture to stand in for it"


def portable(notebook: NotebookNode) -> Iterator[str]:
    """Markdown keeps to the subset that looks alike in the book, in Colab and on GitHub."""
    for i, text in prose(notebook):
        for what, pattern in LEAKS.items():
            if found := re.search(pattern, text, re.MULTILINE):
                yield f"cell {i} has {what}: {found[0].strip()!r}"
        for tag in ("details", "summary", "div", "p"):
            if len(re.findall(rf"<{tag}\b", text)) != len(re.findall(rf"</{tag}>", text)):
                yield f"cell {i} does not close each <{tag}> it opens"


def shaped(notebook: NotebookNode) -> Iterator[str]:
    """One title, headings without gaps, the sections every chapter ends with, and a length people finish."""
    headings = [(i, len(hashes), text) for i, body in prose(notebook)
                for hashes, text in re.findall(r"^(#+) +(.+?)\s*$", body, re.MULTILINE)]
    if [level for _, level, _ in headings].count(1) != 1 or headings[0][:2] != (1, 1):
        yield "the first cell must hold the chapter's one title"
    for (_, before, _), (i, level, text) in zip(headings, headings[1:]):
        if level > before + 1:
            yield f"cell {i}: the heading {text!r} skips a level"
    if [text for _, level, text in headings if level == 2][-3:] != ENDING:
        yield f"the chapter must end with the sections {', '.join(ENDING)}"
    if not notebook.cells or "What it takes" not in notebook.cells[0].source:
        yield "the first cell must say what the chapter takes"
    words = sum(len(text.split()) for _, text in prose(notebook))
    if not WORDS[0] <= words <= WORDS[1]:
        yield f"{words} words; a chapter has {WORDS[0]} to {WORDS[1]}"


def legible(notebook: NotebookNode) -> Iterator[str]:
    """Code fits the column, and exported code says what it does and checks its input with errors, not asserts."""
    for i, cell in written(notebook):
        for line in cell.source.splitlines():
            if len(line) > LINE:
                yield f"cell {i} has a line of {len(line)} characters (at most {LINE}): {line.strip()[:40]}…"
        if "export" not in tags(cell):
            continue
        tree, _ = parse(cell.source, f"cell {i}")
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not ast.get_docstring(node):
                yield f"cell {i}: exported {node.name} has no docstring"
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs \
                if isinstance(node, ast.FunctionDef) else []
            if any(a.annotation is None for a in arguments):
                yield f"cell {i}: exported {node.name} has arguments without type hints"
        if any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
            yield f"cell {i}: exported code checks with assert, not with an error"


RULES = (executed, repeatable, pictured, portable, shaped, legible)


def problems(path: Path) -> list[str]:
    """All that is wrong with a chapter, in words. Raises ToolError if it cannot be read."""
    notebook = read(path)
    found = [problem for rule in RULES for problem in rule(notebook)]
    if path.stat().st_size > FILE_BYTES:
        found.append(f"the file weighs {path.stat().st_size:,} bytes, more than {FILE_BYTES:,}")
    return found


def run(arguments: argparse.Namespace) -> int:
    count = 0
    for path in chapters(arguments.book, arguments.chapters):
        for problem in problems(path):
            count += 1
            print(f"{path.stem}: {problem}")
    return 1 if count else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", help="numbers, names or paths; none: all")
    parser.add_argument("--book", type=Path, default=BOOK, help="the folder of the chapters")
    command(run, parser)
