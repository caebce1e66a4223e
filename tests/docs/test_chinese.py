"""The Chinese pages: the same commands and code as the English ones, the field's terms."""

import os
import re
from pathlib import Path

import pytest

from scripts.site.pages import translations
from scripts.tables.markdown import in_language_of

ROOT = Path(__file__).resolve().parents[2]
CHINESE = ["README.zh.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/zh/**/*.md"))]


def english_of(name: str) -> str:
    return name.replace("README.zh.md", "README.md").replace("docs/zh/", "docs/")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def programs(text: str) -> list[str]:
    """The code blocks without comments and the spaces before them."""
    blocks = re.findall(r"```.*?```", text, flags=re.S)
    return [re.sub(r"(^| +)# .*$", "", block, flags=re.M) for block in blocks]


@pytest.mark.parametrize("page", CHINESE)
def test_code_is_that_of_the_english_page(page):
    assert programs(read(page)) == programs(read(english_of(page)))


@pytest.mark.parametrize("page", CHINESE)
def test_links_lead_between_the_languages(page):
    folder, english = os.path.dirname(page), english_of(page)
    assert f"\n\n[English]({os.path.relpath(english, folder)}) | 简体中文\n" in read(page)
    assert f"\n\nEnglish | [简体中文]({os.path.relpath(page, os.path.dirname(english))})\n" in read(english)


def test_translated_texts_of_the_configuration_page_name_the_same_values():
    def names(text: str) -> set[str]:
        return {" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)}

    for key, (english, chinese) in translations().items():
        assert not chinese or names(english) == names(chinese), key


def test_generated_tables_have_chinese_words_and_links_of_their_page():
    table = "| attention | top-1 % |\n| --- | --- |\n| [Linear attention](../../a.md) | as `soft` |\n"
    assert in_language_of(Path("docs/guide/weights.md"), table) == table
    assert in_language_of(Path("docs/zh/guide/weights.md"), table) == (
        "| 注意力 | top-1（%） |\n| --- | --- |\n| [线性注意力](../../../a.md) | 同 `soft` |\n"
    )
