"""What the documentation site is made from: texts of the settings, docstrings of the attentions."""

import ast
import inspect
import re
import sys

import pytest

from ppattn import zoo
from ppattn.attention import ATTENTIONS
from ppattn.backbones import BACKBONES
from ppattn.config import dotted
from ppattn.settings import Config, Model
from scripts.site import formulas, pages

ROOT = pages.ROOT


def test_every_key_has_a_meaning():
    texts = pages.texts()
    assert [key for key, text in texts.items() if not text] == []
    assert {key for key, value in dotted(Config().model_dump()) if not isinstance(value, dict)} <= texts.keys()
    for backbone in BACKBONES.list():
        for key in pages.signature(BACKBONES.get(backbone)).keys() - Model.model_fields.keys():
            assert f"model.{key}" in texts, f"ppattn/backbones/arguments.yaml does not explain {key}"


def test_every_key_is_on_the_configuration_page_in_both_languages():
    for chinese in (False, True):
        page = pages.configuration(chinese)
        for key in pages.texts():
            if not key.startswith(("page.", "type.", "section.")):
                assert f"| `{key.rpartition('.')[2]}` |" in page, key
    row = "| `ema` | number > 0, < 1 or `null` | `null` | decay per step of a moving average"
    assert row in pages.configuration()


def test_a_text_without_translation_stays_english(monkeypatch):
    monkeypatch.setattr(pages, "translations", lambda: {"train.ema": ("an older text", "旧文")})
    page = pages.configuration(chinese=True)
    assert "旧文" not in page and "decay per step of a moving average" in page


@pytest.mark.parametrize("name", ATTENTIONS.list())
def test_docstring_of_an_attention_has_what_its_page_shows(name):
    cls = ATTENTIONS.get(name)
    doc = inspect.getdoc(sys.modules[cls.__module__])
    assert re.search(r"\(.*20\d\d.* arXiv \d{4}\.\d{5}\)\.$", doc.split("\n")[0]), "the first line ends with the paper"
    assert re.search(r"^Cost |[ (]Cost\b", doc, re.MULTILINE)
    others = "".join(inspect.getdoc(sys.modules[base.__module__]) or "" for base in cls.__mro__[1:-1])
    for option in cls.options():
        assert re.search(rf"(`|^    ){option}[`: ]", doc + others, re.MULTILINE), f"{option} is not explained"
    page = pages.attention_page(name)
    assert "class='formula'" in page and zoo.attentions()[name].arxiv in page


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("y_i = sum_j a_ij v_j", r"y_{i} = \sum_{j} a_{i j} v_{j}"),
        ("q phi(k_j)^T / (2 sqrt(d)) + 1/N", r"\frac{q \phi\left(k_{j}\right)^{T}}{2 \sqrt{d}} + 1/N"),
        ("q~+_i . k' * K1^T", r"\tilde{q}^{+}_{i} \cdot{} k' \odot K_{1}^{T}"),
        ("S = exp(-|q - k|^2 / 2)", r"S = \operatorname{exp}\left(-\frac{\left|q - k\right|^{2}}{2}\right)"),
        ("k^ <- (1 + x) / N + f(k^)", r"\hat{k} \leftarrow \frac{1 + x}{N} + f\left(\hat{k}\right)"),
        ("sum_{t in 3x3} D^-1/2 <- x", r"\sum_{t \text{ in } 3 \times 3} D^{-1/2} \leftarrow x"),
        (
            "silu(act_proj(x)) + convolution of V",
            r"\operatorname{silu}\left(\operatorname{act\_proj}\left(x\right)\right) + \text{ convolution of } V",
        ),
    ],
)
def test_formulas_become_latex(text, latex):
    assert formulas.latex(text) == latex


def test_lines_of_formulas_break_at_wide_gaps_and_continue_where_indented():
    block = "    a = b\n        + c,    words beside the formula\n    d = e      (eq. 3)\n"
    assert formulas.rows(block) == [["a = b + c,", r"\text{words beside the formula}"], ["d = e", r"\text{(eq. 3)}"]]


def test_troubleshooting_quotes_messages_of_the_code():
    said = []
    for path in (ROOT / "ppattn").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            said.append("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts))
    text = (ROOT / "docs/guide/troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.*?)` \|", text, re.MULTILINE)
    assert len(rows) > 15
    for row in rows:
        for part in filter(None, (part.strip() for part in row.split("…"))):
            assert any(part in text for text in said), part
