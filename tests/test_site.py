"""The built site in a headless browser: links, widgets, colour modes, widths, accessibility, and no third party."""

import functools
import http.server
import itertools
import re
import shutil
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import Error, sync_playwright

from tools.address import addresses
from tools.build import build
from tools.notebooks import ROOT, ToolError, chapters
from tools.pages import localise, with_pictures
from tools.vendor import AXE, vendor

SITE = ROOT / "_build" / "html"
CHAPTERS = [f"book/{path.stem}.html" for path in chapters()]
PAGES = ["index.html", *CHAPTERS, "search.html"]
WIDTHS, MODES = (360, 768, 1280), ("light", "dark")
PAGE_BYTES = 1_500_000


@pytest.fixture(scope="session")
def site():
    vendor()
    build()
    return SITE


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="session")
def browser():
    with sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"])
        except Error:
            pytest.exit("Chromium not found: install it (Debian: apt-get install chromium; elsewhere: "
                        ".venv/bin/playwright install chromium)", returncode=1)
        yield chromium
        chromium.close()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def server(site):
    """The site's address on localhost, under the path that it has when it is published."""
    with http.server.ThreadingHTTPServer(("localhost", 0), functools.partial(Quiet, directory=site)) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://localhost:{served.server_port}"
        served.shutdown()


@pytest.fixture
def visit(browser):
    """A function that opens an address in a fresh page, which collects what went wrong in `faults`."""
    contexts = []

    def open_page(address: str, width: int = 1280, mode: str = "light", **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=mode, **options)
        contexts.append(context)
        page = context.new_page()
        page.faults = []
        own = f"{urlsplit(address).scheme}://{urlsplit(address).netloc}/"
        page.on("console", lambda m: page.faults.append(f"console: {m.text}") if m.type == "error" else None)
        page.on("pageerror", lambda error: page.faults.append(f"error: {error}"))
        page.on("request", lambda r: page.faults.append(f"asks {r.url}")
                if not r.url.startswith((own, "data:", "blob:")) else None)
        page.goto(address)
        page.wait_for_load_state("networkidle")
        if page.locator(".widget-subarea").count() and options.get("java_script_enabled", True):
            page.wait_for_function("document.querySelectorAll('.widget-subarea').length =="
                                   " document.querySelectorAll('.widget-subarea > .widget-vbox').length")
        return page

    yield open_page
    for context in contexts:
        context.close()


# Every page, in every width and colour mode


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_without_errors_third_parties_or_sideways_scroll(visit, server, name, mode):
    page = visit(f"{server}/{name}", WIDTHS[0], mode)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(100)  # for what follows the width
        assert page.evaluate("document.documentElement.scrollWidth") <= width, width
    assert page.faults == []
    assert page.evaluate("document.documentElement.dataset.theme") == mode
    backgrounds = page.eval_on_selector_all(".cell_output img", "l => l.map(i => getComputedStyle(i).backgroundColor)")
    assert set(backgrounds) <= {"rgb(255, 255, 255)"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_serious_violation(visit, server, name, mode):
    page = visit(f"{server}/{name}", mode=mode)
    assert serious(page) == []


def serious(page) -> list[str]:
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    return [f"{v['id']}: {node['target']}" for v in found if v["impact"] in ("serious", "critical")
            for node in v["nodes"]]


@pytest.mark.parametrize("name", PAGES[:-1])
def test_a_page_opened_from_disk_works(visit, site, name):
    page = visit((site / name).as_uri())
    assert page.faults == []


# Widgets


def read_frame(widget) -> tuple[str, str]:
    """(picture, alt text) of the one frame a widget shows."""
    (source, alt), = widget.locator("img").evaluate_all(
        "l => l.filter(i => i.offsetParent).map(i => [i.src, i.alt])")
    return source, alt


def positions(widget) -> list[int]:
    """The number of positions of each slider."""
    return [int(float(handle.get_attribute("aria-valuemax"))) + 1 for handle in widget.locator(".noUi-handle").all()]


def walk(page, widget):
    """Move every slider by keyboard through every combination; yields the frame seen at each."""
    handles = widget.locator(".noUi-handle").all()
    for combination in itertools.product(*(range(n) for n in positions(widget))):
        for handle, position in zip(handles, combination):
            while (at := int(float(handle.get_attribute("aria-valuenow")))) != position:
                handle.press("ArrowRight" if at < position else "ArrowLeft")
        yield read_frame(widget)


@pytest.mark.parametrize("name", CHAPTERS)
def test_every_slider_reaches_every_frame_by_keyboard_and_each_differs(visit, server, name):
    page = visit(f"{server}/{name}")
    widgets = page.locator(".widget-subarea > .widget-vbox").all()
    assert len(widgets) >= 2
    for widget in widgets:
        for handle in widget.locator(".noUi-handle").all():
            assert handle.get_attribute("aria-label") and handle.get_attribute("aria-valuetext")
        frames = list(walk(page, widget))
        assert len(frames) > 1
        assert len({picture for picture, _ in frames}) == len({alt for _, alt in frames}) == len(frames)
        assert all(len(alt.split()) >= 5 for _, alt in frames)
    assert page.faults == []


@pytest.mark.parametrize("name", CHAPTERS)
def test_play_moves_the_picture(visit, server, name):
    page = visit(f"{server}/{name}")
    for widget in page.locator(".widget-subarea > .widget-vbox:has(.widget-play)").all():
        before = read_frame(widget)
        widget.get_by_role("button", name="Play").click()
        page.wait_for_timeout(1600)
        assert read_frame(widget) != before
    assert page.faults == []


@pytest.mark.parametrize("name", CHAPTERS)
def test_without_scripts_the_first_frame_stands_in(visit, site, server, name):
    count = (site / name).read_text().count('<script type="application/vnd.jupyter.widget-view+json">')
    page = visit(f"{server}/{name}", java_script_enabled=False)
    pictures = page.locator("noscript img").all()
    assert len(pictures) == count
    assert all(picture.is_visible() and picture.get_attribute("alt") for picture in pictures)


# Links, buttons, weight


class Links(HTMLParser):
    """The targets and the anchors of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.targets, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors |= {attributes.get("id")}
        self.targets += [attributes[key] for key in ("href", "src") if attributes.get(key)]


def broken_links(site: Path, names: list[str]) -> list[str]:
    """The links within the site that lead nowhere."""
    broken = []
    for name in names:
        page = site / name
        for target in Links(page.read_text()).targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            file = file / "index.html" if file.is_dir() else file
            if not file.is_file() or parts.fragment and file.suffix == ".html" and parts.fragment not in (
                    Links(file.read_text()).anchors):
                broken.append(f"{name}: {target}")
    return broken


def test_every_link_within_the_site_leads_somewhere(site):
    assert broken_links(site, [*PAGES, "genindex.html"]) == []


def test_no_page_links_to_the_placeholder_site_by_its_published_address(site):
    _, address = addresses()
    for name in PAGES:
        assert f'<a href="{address}/' not in re.sub(r'<a [^>]*href=', "<a href=", (site / name).read_text())


@pytest.mark.parametrize("name", CHAPTERS)
def test_the_buttons_point_to_this_chapter(site, name):
    repository, _ = addresses()
    owner_and_name = repository.removeprefix("https://github.com/")
    source = name.replace(".html", ".ipynb")
    targets = Links((site / name).read_text()).targets
    assert f"https://colab.research.google.com/github/{owner_and_name}/blob/main/{source}" in targets
    assert (ROOT / source).is_file()
    assert repository in targets and any(t.startswith(f"{repository}/issues/new") for t in targets)
    assert f"../_sources/{source}" in targets and (site / "_sources" / source).read_text() == (ROOT / source).read_text()


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_page_is_light(site, name):
    page = site / name
    pictures = {target for target in Links(page.read_text()).targets if "_images/" in target}
    weight = page.stat().st_size + sum((page.parent / picture).stat().st_size for picture in pictures)
    assert weight < PAGE_BYTES


@pytest.mark.parametrize("name", CHAPTERS)
def test_every_picture_has_an_alt_text(site, name):
    for image in re.findall(r"<img\b[^>]*>", (site / name).read_text()):
        if "_images/" in image:
            assert len(re.search(r'alt="([^"]*)"', image)[1].split()) >= 5


def test_neighbours_search_sitemap_card_and_404(visit, site, server):
    _, address = addresses()
    page = visit(f"{server}/{CHAPTERS[1]}")
    assert page.locator("a.left-prev").get_attribute("href").endswith(Path(CHAPTERS[0]).name)
    assert page.locator("a.right-next").get_attribute("href").endswith(Path(CHAPTERS[2]).name)
    found = visit(f"{server}/search.html?q=softmax")
    found.wait_for_selector("#search-results li a")
    assert found.faults == []
    sitemap = (site / "sitemap.xml").read_text()
    assert all(f"<loc>{address}/{name}</loc>" in sitemap for name in CHAPTERS)
    text = (site / CHAPTERS[0]).read_text()
    assert f'property="og:url" content="{address}/{CHAPTERS[0]}"' in text
    card = re.search(r'property="og:image" content="([^"]+)"', text)[1]
    assert card.startswith(address) and (site / card.removeprefix(address + "/")).is_file()
    base = "/" + address.split("/", 3)[3] + "/"
    assert all(t.startswith((base, "http", "#", "data:")) for t in Links((site / "404.html").read_text()).targets)


# That these checks can fail: each meets an example it must refuse.


def test_browser_checks_catch(visit, tmp_path):
    (tmp_path / "bad.html").write_text("""<html lang="en"><title>x</title><main><h1>x</h1>
        <div style="width:3000px">wide</div><img src="https://example.org/a.png"><input>
        <script>console.error("broken")</script></main></html>""")
    page = visit((tmp_path / "bad.html").as_uri())
    assert any(fault.startswith("console: broken") for fault in page.faults)
    assert "asks https://example.org/a.png" in page.faults
    assert page.evaluate("document.documentElement.scrollWidth") > 1280
    assert {violation.split(":")[0] for violation in serious(page)} >= {"image-alt", "label"}


def test_widget_checks_catch_a_slider_that_is_not_linked(visit, site, server, tmp_path):
    text = (site / CHAPTERS[1]).read_text().replace('"DirectionalLinkModel"', '"LayoutModel"', 1)
    broken = site / "book" / "broken.html"
    broken.write_text(text)
    try:
        page = visit(f"{server}/book/broken.html")
        counts = []
        for widget in page.locator(".widget-subarea > .widget-vbox").all():
            frames = list(walk(page, widget))
            counts.append(len({picture for picture, _ in frames}) == len(frames))
        assert counts.count(False) == 1
    finally:
        broken.unlink()


def test_the_link_check_catches(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#there"></a><a href="b.html#gone"></a><a href="c.html"></a>')
    (tmp_path / "b.html").write_text('<p id="there"></p>')
    assert broken_links(tmp_path, ["a.html"]) == ["a.html: b.html#gone", "a.html: c.html"]


def test_a_warning_fails_the_build(tmp_path):
    (tmp_path / "_config.yml").write_text("title: x\nexecute: {execute_notebooks: 'off'}\n")
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: index\n")
    (tmp_path / "index.md").write_text("# x\n\n[gone](nowhere.md)\n")
    with pytest.raises(ToolError, match="nowhere.md"):
        build(tmp_path)


def test_links_to_the_published_site_become_relative_and_widgets_get_their_picture():
    assert localise('<a href="https://o.io/x/book/02.html#a">', "https://o.io/x/", "../") == '<a href="../book/02.html#a">'
    script = '<script type="application/vnd.jupyter.widget-view+json">{"model_id": "m"}</script>'
    assert with_pictures(script, {"m": ("AAAA\n", 'a "b"')}) == (
        script + '<noscript><img src="data:image/png;base64,AAAA" alt="a &quot;b&quot;"></noscript>')
    assert with_pictures(script, {}) == script
