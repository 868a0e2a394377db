"""Weave the chapters together: recap cells, figure cells and book/transformer.py.

A code cell tagged `export` defines what later chapters use. Every later chapter that uses some of it gets one cell
with exactly that code; book/transformer.py gets all of it; and every chapter that draws gets book/figures.py whole.
"""

import argparse
import ast
import builtins
import re
import symtable
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

from tools.notebooks import BOOK, ToolError, chapters, command, is_generated, parse, read, tags, title, write, write_text

KNOWN = {*dir(builtins), "__name__", "__file__", "get_ipython", "display", "In", "Out", "_"}
EXPORTABLE = {*sys.stdlib_module_names, "torch"}  # what transformer.py may import
PROMPTS = {"recap": "Recap: code from earlier chapters", "figures": "Figures: the book's style and sliders"}
COMPREHENSIONS = {"listcomp", "setcomp", "dictcomp", "genexpr"}


@dataclass
class Statement:
    """One statement at the top level of a cell."""

    source: str  # with the comments above it
    node: ast.stmt
    binds: set[str]  # names it defines
    now: set[str]  # names it needs when it runs
    later: set[str]  # names that the functions in it need when they are called

    @property
    def own(self) -> set[str]:
        """Names it may use because it defines them itself: a loop's variable, a function that calls itself."""
        if isinstance(self.node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            return {walrus.target.id for walrus in ast.walk(self.node) if isinstance(walrus, ast.NamedExpr)}
        return self.binds


@dataclass
class Definition:
    """An exported statement and all that it needs."""

    source: str
    names: set[str]
    chapter: Path
    needs: set[str]  # exported names
    imports: dict[str, str]  # name -> import statement


@dataclass
class Woven:
    """What the chapters export so far."""

    definitions: list[Definition] = field(default_factory=list)
    titles: dict[Path, str] = field(default_factory=dict)

    def find(self, name: str) -> Definition | None:
        return next((d for d in self.definitions if name in d.names), None)

    def closure(self, names: set[str]) -> list[Definition]:
        """The definitions of `names` and of all that they need, in the order of definition."""
        wanted, open_names = [], sorted(names)
        while open_names:
            definition = self.find(open_names.pop())
            if definition and definition not in wanted:
                wanted.append(definition)
                open_names += sorted(definition.needs)
        return [d for d in self.definitions if d in wanted]


def statements(source: str, where: str) -> Iterator[Statement]:
    """The statements of a cell. Raises ToolError on a syntax error, naming `where`."""
    tree, plain = parse(source, where)
    lines, end = re.split(r"\r\n?|\n", plain), 0
    for node in tree.body:
        text = "\n".join(lines[end:node.end_lineno]).strip("\n")
        end = node.end_lineno
        try:
            table = symtable.symtable(ast.unparse(node), where, "exec")
        except SyntaxError as error:
            raise ToolError(f"{where}: syntax error: {error.msg}") from None
        symbols = table.get_symbols()
        binds = {s.get_name() for s in symbols if s.is_assigned() or s.is_imported() or s.is_namespace()}
        now = {s.get_name() for s in symbols if s.is_referenced()}
        if isinstance(node, ast.AugAssign):
            now |= binds
        later = set()
        for child in table.get_children():
            needed_now, needed_later = _globals(child, called=False)
            now |= needed_now
            later |= needed_later
        yield Statement(text, node, binds, now, later)


def _globals(table: symtable.SymbolTable, called: bool) -> tuple[set[str], set[str]]:
    """The global names used in a scope: (when the statement runs, when its functions are called)."""
    called = called or (table.get_type() == "function" and table.get_name() not in COMPREHENSIONS)
    used = {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
    now, later = (set(), used) if called else (used, set())
    for child in table.get_children():
        child_now, child_later = _globals(child, called)
        now |= child_now
        later |= child_later
    return now, later


def imported(node: ast.stmt) -> dict[str, str]:
    """The names an import statement binds, each with an import statement of its own."""
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.split(".")[0]:
                f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "") for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name:
                f"from {node.module} import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
                for alias in node.names}
    return {}


def join_imports(imports: dict[str, str]) -> str:
    """Import statements as a sorted block: the standard library, then torch."""
    groups: dict[bool, dict[str, set[str]]] = {False: {}, True: {}}
    for line in imports.values():
        module, _, name = line.partition(" import ") if line.startswith("from") else (line, "", "")
        third_party = line.split()[1].split(".")[0] not in sys.stdlib_module_names
        groups[third_party].setdefault(module, set()).add(name)
    blocks = []
    for modules in groups.values():
        lines = [module + (f" import {', '.join(sorted(names))}" if module.startswith("from") else "")
                 for module, names in sorted(modules.items(), key=lambda item: (item[0].startswith("from"), item[0]))]
        if lines:
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def code(definitions: list[Definition], titles: dict[Path, str]) -> str:
    """Definitions as code: their imports, then each under the name of its chapter."""
    imports = {name: line for d in definitions for name, line in d.imports.items()}
    parts, chapter = [join_imports(imports)] if imports else [], None
    for d in definitions:
        heading = f"# From chapter {d.chapter.name[:2]}, {titles[d.chapter]}\n\n" if d.chapter != chapter else ""
        chapter = d.chapter
        parts.append(heading + d.source)
    return "\n\n\n".join(parts)


def read_chapter(path: Path, woven: Woven, figures: set[str]) -> tuple[nbformat.NotebookNode, set[str], bool]:
    """Check a chapter's names and add its exports to `woven`.

    Returns the notebook, the exported names of earlier chapters that it uses, and whether it draws. Raises ToolError
    with chapter, cell and name for a name that is exported twice, used before it is defined or defined nowhere.
    """
    notebook = read(path)
    woven.titles[path] = title(notebook)
    cells = [(f"{path.name}, cell {i}", cell, list(statements(cell.source, f"{path.name}, cell {i}")))
             for i, cell in enumerate(notebook.cells, start=1) if cell.cell_type == "code" and not is_generated(cell)]
    everywhere = {name for _, _, body in cells for statement in body for name in statement.binds}
    earlier = set().union(*(d.names for d in woven.definitions))
    defined: set[str] = set()
    imports: dict[str, str] = {}
    own_exports: set[str] = set()
    only_full: dict[str, str] = {}  # names whose value comes from a full run -> the cell that made them
    own_lines: dict[str, tuple[str, str | None]] = {}  # names the chapter defines -> where, and the import if it is one
    used: set[str] = set()
    draws = False
    for where, cell, body in cells:
        exporting, full = "export" in tags(cell), "full-run" in tags(cell)
        here = set().union(*(s.binds for s in body))
        if full and "nbval-ignore-output" not in tags(cell):
            raise ToolError(f"{where}: a full-run cell needs the tag nbval-ignore-output too")
        for s in body:
            for name in sorted(s.now | s.later):
                if name in only_full and not full and name not in s.own:
                    raise ToolError(f"{where}: {name!r} comes from the full-run {only_full[name]}; tag this cell full-run")
                if name in defined or name in s.own:
                    continue
                if name in earlier:
                    used.add(name)
                elif name in KNOWN:
                    continue
                elif name in figures and not exporting:
                    draws = True
                elif exporting and name not in here or name in s.now or name not in everywhere:
                    what = "used before it is defined" if name in everywhere else "defined nowhere"
                    raise ToolError(f"{where}: {name!r} is {what}")
            again = s.binds & own_exports
            if again and not exporting:
                raise ToolError(f"{where}: {min(again)!r} is exported above and means something else here")
            defined |= s.binds
            lines = imported(s.node)
            imports.update(lines)
            for name in s.binds:
                if name not in lines:
                    imports.pop(name, None)
                own_lines.setdefault(name, (where, lines.get(name)))
                only_full.pop(name, None)
                if full:
                    only_full[name] = where.split(", ")[1]
            if exporting:
                _export(s, where, path, woven, imports, earlier | own_exports | here)
                own_exports |= s.binds
    recap = [d for d in woven.closure(used) if d.chapter != path]
    meant = {name: None for d in recap for name in d.names} | {n: line for d in recap for n, line in d.imports.items()}
    for name, (where, line) in own_lines.items():
        if name in meant and (line is None or line != meant[name]):
            raise ToolError(f"{where}: {name!r} means something else in the recap; choose another name")
    return notebook, used, draws


def _export(s: Statement, where: str, chapter: Path, woven: Woven, imports: dict[str, str], exported: set[str]) -> None:
    """Add an exported statement to `woven`."""
    if isinstance(s.node, (ast.Import, ast.ImportFrom)):
        return
    if not isinstance(s.node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)) \
            or not s.binds or isinstance(s.node, ast.AnnAssign) and s.node.value is None:
        raise ToolError(f"{where}: an exported cell may hold definitions only, got {ast.unparse(s.node)[:60]!r}")
    if not s.source.strip():
        raise ToolError(f"{where}: an exported cell may hold one statement a line, got {ast.unparse(s.node)[:60]!r}")
    if any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.walk(s.node)):
        raise ToolError(f"{where}: {min(s.binds)!r} imports inside; put the import at the top of the chapter")
    for name in sorted(s.binds):
        if line := next((d.imports[name] for d in woven.definitions if name in d.imports), None):
            raise ToolError(f"{where}: {name!r} is exported, but earlier exported code has {line!r}")
        if (other := woven.find(name)) is not None:
            raise ToolError(f"{where}: {name!r} is exported twice, first by {other.chapter.name}")
    needs = (s.now | s.later) - s.binds
    own_imports = {name: imports[name] for name in needs if name in imports}
    for name in sorted(needs - set(own_imports) - KNOWN):
        if name not in exported:
            raise ToolError(f"{where}: {name!r} is used by exported code but not exported itself")
    for name, line in own_imports.items():
        if line.split()[1].split(".")[0] not in EXPORTABLE:
            raise ToolError(f"{where}: exported code may import torch and the standard library only; "
                            f"{name!r} comes from {line!r}")
        if line.startswith("import ") and "." in line and " as " not in line:
            raise ToolError(f"{where}: {line!r} needs a name of its own in exported code: import … as …")
        if (other := woven.find(name)) is not None:
            raise ToolError(f"{where}: {name!r} is {line!r} here but exported by {other.chapter.name}")
        for d in woven.definitions:
            if d.imports.get(name, line) != line:
                raise ToolError(f"{where}: {name!r} is {line!r} here but {d.imports[name]!r} in {d.chapter.name}")
    woven.definitions.append(Definition(s.source, set(s.binds), chapter, needs - set(own_imports), own_imports))


def set_cell(notebook: nbformat.NotebookNode, tag: str, source: str | None) -> None:
    """Put the generated cell `tag` in its place (the figures follow the recap), change it, or take it out."""
    old, *doubled = [i for i, cell in enumerate(notebook.cells) if tag in tags(cell)] or [None]
    for i in reversed(doubled):
        del notebook.cells[i]
    if source is None:
        if old is not None:
            del notebook.cells[old]
    elif old is not None:
        if notebook.cells[old].source != source:
            notebook.cells[old].update(source=source, outputs=[], execution_count=None)
    else:
        first = next((i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"
                      and "recap" not in tags(cell) and not cell.source.startswith("%pip")), len(notebook.cells))
        heading = PROMPTS[tag]
        cell = nbformat.v4.new_code_cell(source, id=tag, metadata={
            "tags": [tag, "hide-input"], "cellView": "form", "jupyter": {"source_hidden": True},
            "mystnb": {"code_prompt_show": heading, "code_prompt_hide": heading}})
        notebook.cells.insert(first, cell)


def form(tag: str, source: str) -> str:
    """The source under the title that Colab shows in its place."""
    return f'#@title {PROMPTS[tag]} {{display-mode: "form"}}\n{source}'


def weave(book: Path = BOOK, check: bool = False) -> list[str]:
    """Bring recap cells, figure cells and transformer.py up to date; returns what changed, or with `check` would."""
    figures_source = (book / "figures.py").read_text(encoding="utf-8").strip() if (book / "figures.py").exists() else ""
    figure_names = {name for s in statements(figures_source, "figures.py") for name in s.binds if name[0] != "_"}
    woven, changed, results = Woven(), [], []
    for path in chapters(book):
        earlier = list(woven.definitions)
        notebook, used, draws = read_chapter(path, woven, figure_names)
        before = nbformat.writes(notebook)
        recap = None
        if used:
            wanted = [d for d in woven.closure(used) if d in earlier]
            recap = form("recap", code(wanted, woven.titles))
        set_cell(notebook, "recap", recap)
        set_cell(notebook, "figures", form("figures", figures_source) if draws else None)
        if nbformat.writes(notebook) != before:
            changed.append(path.name)
            results.append((path, notebook))
    if woven.definitions:
        text = ('"""The Transformer of "Attention Is All You Need", as the chapters of Attention, Cell by Cell build it.\n\n'
                "Generated from the chapters' exported cells by `make weave`; do not edit. Needs torch and the standard "
                'library.\nMIT License.\n"""\n\n' + code(woven.definitions, woven.titles) + "\n")
        target = book / "transformer.py"
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            changed.append(target.name)
            if not check:
                write_text(target, text)
    if not check:
        for path, notebook in results:
            write(path, notebook)
    return changed


def run(arguments: argparse.Namespace) -> int:
    changed = weave(arguments.book, arguments.check)
    for name in changed:
        print(f"{name}: {'stale; run make weave' if arguments.check else 'woven'}")
    return 1 if arguments.check and changed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if anything is stale")
    parser.add_argument("--book", type=Path, default=BOOK, help="the folder of the chapters")
    command(run, parser)
