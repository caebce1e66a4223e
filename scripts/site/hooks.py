"""Hooks of MkDocs (mkdocs.yml): the pages of the site and their links.

Pages keep the place that they have in the repository, so that a relative link leads to the same page on the site and in
the repository. A linked file that is no page gets one that shows it.
"""

import copy
import csv
import posixpath
import re
import subprocess
import sys
import tarfile
from collections.abc import Collection
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Link, Navigation, Section
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

from ppattn.files.cache import locked
from ppattn.files.download import fetch
from scripts.site import pages as made

ROOT = made.ROOT
PAGES = ("*.md", "docs/**/*.md", "examples/**/*.md", "results/**/*.md", "ppattn/zoo/released/*.md")
KATEX = "https://registry.npmjs.org/katex/-/katex-0.19.1.tgz"
KATEX_DIGEST = ("sha256", "24da5a599eb2fcede2e270b99a6ff48bca816beecc95feeb84e8cccbd1bb34fd")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".cff": "yaml", ".sh": "bash", ".json": "json"}
PICTURES = (".png", ".jpg", ".svg")
CHINESE = {"Start": "开始", "Guide": "指南", "Lab": "实验"}  # the sections that have Chinese pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """All pages: those of the repository, those made from code, and a page or copy of every file that they link."""
    pages = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for pattern in PAGES
        for path in sorted(ROOT.glob(pattern))
    }
    out = assets()
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        names = {"output_files_dir": f"{path.stem}_files", "unique_key": path.stem}
        pages[f"notebooks/{path.name}.md"], found = MarkdownExporter().from_filename(str(path), resources=names)
        out |= {f"notebooks/{place}": picture for place, picture in found["outputs"].items()}
    pages |= made.pages()
    for name, text in list(pages.items()):
        for target in LINK.findall(text):
            place = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
            path = ROOT / place
            if path.suffix in PICTURES and path.is_file():
                out[place] = path.read_bytes()
            elif path.exists() and not {place, f"{place}.md"} & (pages.keys() | made.MOVED.keys()):
                pages[f"{place}.md"] = source(path)
                if path.is_dir():
                    out |= {f"{place}/{one.name}": one.read_bytes() for one in path.iterdir() if one.suffix in PICTURES}
    own = [File.generated(config, name, content=content) for name, content in (out | pages).items()]
    for file in own:
        file.dest_uri = file.dest_uri.removeprefix("docs/").replace("README.zh/", "zh/")
    config.nav = navigation(config.nav, pages)
    return Files([*own, *(file for file in files if file.src_dir != config.docs_dir)])  # the others are the theme's


def navigation(nav: list[dict[str, list[str]]], pages: Collection[str]) -> list[dict[str, list]]:
    """The sections of mkdocs.yml with the pages that their patterns match, each page once, and the Chinese pages."""
    named = {pattern for section in nav for patterns in section.values() for pattern in patterns}
    out: list[dict[str, list]] = []
    chinese: list[dict[str, list[str]]] = []
    for section in nav:
        for title, patterns in section.items():
            found: dict[str, None] = {}
            for pattern in patterns:  # a page that is named and not there stays, so that MkDocs reports it
                others = sorted({one for one in pages if Path(one).match(pattern)} - named)
                found |= dict.fromkeys(others if "*" in pattern else [pattern])
            if found:
                out.append({title: list(found)})
            if title in CHINESE:
                chinese.append({CHINESE[title]: [one for name in found if (one := made.twin(name)) in pages]})
    return [*out, {"中文": chinese}]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files that are no pages lead to the pages that show them."""
    folder = posixpath.dirname(page.file.src_uri)

    def target(match: re.Match) -> str:
        place = posixpath.normpath(posixpath.join(folder, match[0]))
        place = place if files.get_file_from_path(place) else made.shown_by(place, page.file.src_uri)
        return posixpath.relpath(place, folder or ".") if files.get_file_from_path(place) else match[0]

    return LINK.sub(target, markdown)


def on_page_context(context: dict[str, Any], page: Page, config: MkDocsConfig, nav: Navigation) -> dict[str, Any]:
    """The Chinese pages have the theme's Chinese words and their own navigation, with the untranslated pages last."""
    name, pages = page.file.src_uri, {one.file.src_uri: one for one in nav.pages}
    chinese = made.is_chinese(name)
    config.theme["language"] = "zh" if chinese else "en"
    home = pages.get("README.zh.md" if chinese else "README.md", nav.homepage)
    config.extra["homepage"] = home.url if home else ""
    other = pages.get(made.twin(name)) or pages.get("README.md" if chinese else "README.zh.md")
    own = copy.copy(nav)
    *own.items, last = nav.items
    if chinese:
        named = [one for section in own.items if section.title in CHINESE for one in section.children]
        english = [Link(one.title, one.url) for one in named if made.twin(one.file.src_uri) not in pages]
        own.items = [*(last.children or []), Section("英文指南", english)]
    own.items += [Link("English" if chinese else "中文", other.url)] if other else []
    return context | {"nav": own}


def on_post_build(config: MkDocsConfig) -> None:
    """The page that classifies pictures; then a check of every address in the site."""
    site = Path(config.site_dir)
    command = [sys.executable, "tools/demo.py", "--model", made.DEMO_MODEL, "--output", str(site / "demo/app")]
    subprocess.run(command, cwd=ROOT, check=True)
    for path in site.rglob("*.html"):
        for tag, address in re.findall(
            r"<(\w+)\b[^>]*\s(?:src|href)=[\"']?([^\"'\s>]+)", path.read_text(encoding="utf-8")
        ):
            parts = urlsplit(unquote(address))
            if parts.scheme or parts.netloc:
                if tag != "a" and parts.scheme != "data":
                    raise PluginError(f"{path} loads from another server: {address}")
            elif parts.path:
                target = site / parts.path.lstrip("/") if parts.path.startswith("/") else path.parent / parts.path
                if not (target / "index.html" if target.is_dir() else target).is_file():
                    raise PluginError(f"{path} links {address}, which does not exist")


def assets() -> dict[str, str | bytes]:
    """Style and scripts of the site, and KaTeX from its npm package, kept in .venv-docs/."""
    found: dict[str, str | bytes] = {f"docs/assets/{p.name}": p.read_bytes() for p in ROOT.glob("docs/assets/*")}
    cache = ROOT / ".venv-docs"
    with locked(cache), tarfile.open(fetch([KATEX], cache / Path(KATEX).name, "KaTeX", KATEX_DIGEST)) as archive:
        for member in archive.getmembers():
            place = member.name.removeprefix("package/dist/")
            if re.fullmatch(r"katex\.min\.(js|css)|fonts/.*\.woff2", place) and (file := archive.extractfile(member)):
                found[f"katex/{place}"] = file.read()
    return found


def source(path: Path) -> str:
    """A page that shows a file, or the files of a folder."""
    name = path.relative_to(ROOT).as_posix()
    page = f"---\nsearch:\n  exclude: true\n---\n\n# `{name}`\n\n"
    if path.is_file():
        return page + _shown(path)
    files = sorted(one for one in path.iterdir() if one.is_file())
    parts = [
        f"## {one.name}\n\n" + (f"![{one.stem}]({path.name}/{one.name})\n" if one.suffix in PICTURES else _shown(one))
        for one in files
    ]
    return page + "\n".join(parts)


def _shown(path: Path) -> str:
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".csv":
        head, *rows = csv.reader(text.splitlines())
        return made.table(head, rows)
    return f"`````{LANGUAGES.get(path.suffix, 'text')}\n{text}`````\n"
