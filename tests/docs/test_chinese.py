"""The Chinese pages have the sections, code, figures and options of the English ones, and the typography of Chinese."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from scripts.site.pages import translations
from scripts.tables.markdown import in_language_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "README.zh.md",
    **{f"docs/guide/{page.name}": f"docs/zh/guide/{page.name}" for page in sorted((ROOT / "docs/guide").glob("*.md"))},
}
CHINESE = sorted({*PAGES.values(), *(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/zh/**/*.md"))})
HAN = "[\u4e00-\u9fff]"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.S)


def sections(text: str) -> list[str]:
    code = re.findall(r"```.*?```", text, flags=re.S)
    parts = re.split(r"^#+ .*$", re.sub(r"```.*?```", "\0", text, flags=re.S), flags=re.M)
    return [re.sub("\0", lambda _: code.pop(0), part) for part in parts]


def programs(section: str) -> list[str]:
    """The code blocks without comments and the spaces before them."""
    blocks = re.findall(r"```.*?```", section, flags=re.S)
    return [re.sub(r"(^| +)# .*$", "", block, flags=re.M) for block in blocks]


def rows(section: str) -> list[list[str]]:
    """The figures of every row of the tables."""
    lines = [line for line in without_code(section).splitlines() if line.startswith("|")]
    return [sorted(figures(line)) for line in lines]


def figures(text: str) -> list[str]:
    prose = re.sub(r"\]\([^)]*\)|`[^`]*`|<!--.*?-->", "", without_code(text))
    return re.findall(r"\d+(?:[.,]\d+)*", prose)


def options(section: str) -> set[str]:
    """What is set as code in the text, with line breaks as spaces."""
    return {" ".join(span.split()) for span in re.findall(r"`([^`]+)`", without_code(section))}


def links(name: str) -> set[str]:
    """What the links of a page lead to, headings left out."""
    targets = re.findall(r"\]\(([^)#]+)", without_code(read(name)))
    return {t if "://" in t else os.path.normpath(os.path.join(os.path.dirname(name), t)) for t in targets}


@pytest.mark.parametrize("english", PAGES)
@pytest.mark.parametrize("same", [programs, rows, lambda part: sorted({*figures(part)}), options])
def test_chinese_pages_hold_what_the_english_ones_hold(english, same):
    theirs, ours = (sections(read(page)) for page in (english, PAGES[english]))
    assert [same(part) for part in ours] == [same(part) for part in theirs]


@pytest.mark.parametrize("english", PAGES)
def test_chinese_pages_link_what_the_english_ones_link_and_each_other(english):
    chinese = PAGES[english]
    here, there = read(english), read(chinese)
    assert links(chinese) - {english} == {PAGES.get(target, target) for target in links(english)} - {chinese}
    assert re.match(rf"# .*\n\nEnglish \| \[简体中文\]\({os.path.relpath(chinese, os.path.dirname(english))}\)\n", here)
    assert re.match(
        rf"# .*\n\n\[English\]\({os.path.relpath(english, os.path.dirname(chinese))}\) \| 简体中文\n", there
    )


@pytest.mark.parametrize("page", CHINESE)
def test_typography_is_that_of_chinese(page):
    text = re.sub(r"\]\([^)]*\)", "]", without_code(read(page)))
    wrong = [
        rf"{HAN}[A-Za-z0-9`]|[A-Za-z0-9%`]{HAN}",  # no space between the scripts
        rf"{HAN} *[,;:?!()]|[,;:?!] *{HAN}",  # half-width punctuation
        rf"[，。；：、（）] (?!\|)|(?<!\|) [，。；：、（）]|{HAN} {HAN}",
        rf"[^|>\s] *\n(?! *(?:[|#<-]|\d\. ))[^\n]*{HAN}",  # a line break in a paragraph, which browsers show as a space
    ]
    for pattern in wrong:
        found = re.search(f".{{0,20}}(?:{pattern}).{{0,20}}", text)
        assert not found, found


def test_translated_texts_of_the_configuration_page_name_the_same_values():
    for key, (english, chinese) in translations().items():
        assert not chinese or options(english) == options(chinese), key


def test_generated_tables_get_chinese_words_and_links_of_their_page():
    table = "| model | accuracy |\n| --- | --- |\n| `model` | cifar10 test: 1.00 % | [card](../../a.md) |\n"
    assert in_language_of(Path("docs/guide/weights.md"), table) == table
    assert in_language_of(Path("docs/zh/guide/weights.md"), table) == (
        "| 模型 | 准确率 |\n| --- | --- |\n| `model` | CIFAR-10 测试集：1.00 % | [说明](../../../a.md) |\n"
    )
