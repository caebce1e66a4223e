"""What the documentation site is made from: texts of the settings, docstrings of the attentions."""

from __future__ import annotations

from ppattn.backbones import BACKBONES
from ppattn.config import dotted
from ppattn.settings import Config, Model
from scripts import docs_site


def test_every_key_has_a_meaning():
    texts = docs_site.texts()
    assert [key for key, text in texts.items() if not text] == []
    assert {key for key, value in dotted(Config().model_dump()) if not isinstance(value, dict)} <= texts.keys()
    for backbone in BACKBONES.list():
        for key in docs_site.signature(BACKBONES.get(backbone)).keys() - Model.model_fields.keys():
            assert f"model.{key}" in texts, f"the docstring of ppattn/backbones/__init__.py does not explain {key}"


def test_every_key_is_on_the_configuration_page_in_both_languages():
    for chinese in (False, True):
        page = docs_site.configuration(chinese)
        for key in docs_site.texts():
            if not key.startswith(("page.", "type.", "section.")):
                assert f"| `{key.rpartition('.')[2]}` |" in page, key
    row = "| `ema` | number > 0, < 1 or `null` | `null` | decay per step of a moving average"
    assert row in docs_site.configuration()


def test_translations_belong_to_the_english_texts():
    known = {key: english for key, (english, _) in docs_site.translations().items()}
    assert known == docs_site.texts(), "python scripts/docs_site.py brings the table up to date"
