"""Sphinx extension for the site: links between chapters that work anywhere, and pictures where scripts are off."""

import html
import re
from pathlib import Path

from tools.notebooks import WIDGET_VIEW, read


def localise(body: str, site: str, to_root: str) -> str:
    """Links to the site's own published address, made relative, so that they also work from disk and in a fork."""
    return re.sub(rf'href="{re.escape(site.rstrip("/"))}/', f'href="{to_root}', body)


def with_pictures(body: str, pictures: dict[str, tuple[str, str]]) -> str:
    """The first frame after each widget, for browsers without scripts. `pictures`: model id -> (PNG data, alt text)."""
    def add(found: re.Match) -> str:
        data, alt = pictures.get(re.search(r'"model_id":\s*"([^"]+)"', found[0])[1], (None, ""))
        if data is None:
            return found[0]
        return (f'{found[0]}<noscript><img src="data:image/png;base64,{data.strip()}" alt="{html.escape(alt)}">'
                "</noscript>")
    return re.sub(rf'<script type="{re.escape(WIDGET_VIEW)}">.*?</script>', add, body, flags=re.DOTALL)


def widget_pictures(path: Path) -> dict[str, tuple[str, str]]:
    return {output.data[WIDGET_VIEW]["model_id"]: (output.data["image/png"],
                                                   cell.metadata.get("mystnb", {}).get("image", {}).get("alt", ""))
            for cell in read(path).cells for output in cell.get("outputs", [])
            if WIDGET_VIEW in output.get("data", {}) and "image/png" in output.data}


def finish_page(app, pagename, templatename, context, doctree) -> None:
    # Jupyter Book always loads sphinx-thebe, which we do not use and whose script declares a constant twice.
    context["script_files"] = [script for script in context["script_files"]
                               if "thebe" not in f"{script.filename} {script.attributes.get('body')}".lower()]
    if not context.get("body"):
        return
    to_root = "../" * pagename.count("/")
    context["body"] = localise(context["body"], app.config.html_baseurl, to_root)
    source = Path(app.env.doc2path(pagename))
    if source.suffix == ".ipynb":
        context["body"] = with_pictures(context["body"], widget_pictures(source))


def configure(app, config) -> None:
    """The cards name full addresses; the 404 page is served for any, so its links start at the site's root."""
    config.ogp_site_url = config.html_baseurl
    config.notfound_urls_prefix = "/" + "/".join(config.html_baseurl.rstrip("/").split("/")[3:]) + "/"


def setup(app) -> dict:
    app.connect("config-inited", configure)
    app.connect("html-page-context", finish_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
