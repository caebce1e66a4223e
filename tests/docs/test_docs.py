"""Pages: their code runs as printed, they name only what is there, and what the site makes of texts and docstrings."""

import ast
import inspect
import os
import re
import sys
from pathlib import Path

import paddle
import pytest

from ppattn import zoo
from ppattn.attention import ATTENTIONS
from ppattn.backbones import BACKBONES
from ppattn.config import dotted_settings
from ppattn.settings import Config, Model
from scripts.site import formulas, pages
from scripts.tables.markdown import in_language_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CHINESE = [ROOT / "README.zh.md", *sorted((DOCS / "zh").rglob("*.md"))]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted({*DOCS.rglob("*.md")} - {*CHINESE}),
    *sorted((ROOT / "results").glob("*/README.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run_code(page: str) -> dict:
    """The names that the only block of Python on a page leaves behind."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    scope: dict = {}
    exec(code, scope)
    return scope


@pytest.mark.slow
def test_readme_example_runs():
    scope = run_code("README.md")
    assert scope["model"](scope["images"]).shape == [2, 10]
    assert [m.shape[2] for m in scope["swin"].forward_features(scope["images"])] == [56, 28, 14, 7]
    assert scope["layer"](paddle.zeros([1, 196, 192])).shape == [1, 196, 192]


@pytest.mark.slow
def test_dense_prediction_example_trains_one_step():
    scope = run_code("docs/guide/dense_prediction.md")
    assert scope["model"](scope["images"]).shape == [2, 19, 96, 128]
    reached = [name for name, p in scope["model"].named_parameters() if p.grad is not None and p.grad.abs().max() > 0]
    assert {name[:18] for name in reached} >= {"backbone.stages.0.", "backbone.stages.3."}


@pytest.mark.slow
def test_training_from_python_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_code("docs/guide/train.md")["summary"]["epochs"] == 1
    assert (tmp_path / "runs/from_python/checkpoints/best.safetensors").exists()


def test_examples_of_the_models_page_run():
    assert run_code("docs/guide/models.md")["model"].block_names()


def test_every_page_can_be_reached_from_the_readme():
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in seen:
            seen.add(page)
            targets = [page.parent / target for target in re.findall(r"\]\(([^)#:]+\.md)", page.read_text())]
            waiting += [target.resolve() for target in targets if target.is_file()]
    assert {*DOCS.rglob("*.md"), *PAGES} <= seen, "the site lists every page, but on GitHub only links lead to them"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES + CHINESE, ids=name_of)
def test_links_and_names_lead_to_what_is_there(page):
    text = page.read_text()
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", re.sub(r"```.*?```", "", text, flags=re.S)):
        if "://" not in target:
            place = page.parent / target if target else page
            assert place.exists(), target
            assert not anchor or place.suffix != ".md" or anchor in anchors(place), f"{target}#{anchor}"
    folders = "ppattn|configs|tools|scripts|results|tests|examples|docs"
    for name in re.findall(rf"\b(?:{folders})/[\w./-]*\w", text):
        assert re.search(r"VERB|VENDOR", name) or (ROOT / name).exists(), f"{page.name} names {name}"


def programs(text: str) -> list[str]:
    """The code blocks without comments and the spaces before them."""
    return [re.sub(r"(^| +)# .*$", "", block, flags=re.M) for block in re.findall(r"```.*?```", text, flags=re.S)]


@pytest.mark.parametrize("page", CHINESE, ids=name_of)
def test_code_is_that_of_the_english_page_and_links_lead_between_them(page):
    english = ROOT / name_of(page).replace("README.zh.md", "README.md").replace("docs/zh/", "docs/")
    text, original = page.read_text(encoding="utf-8"), english.read_text(encoding="utf-8")
    assert programs(text) == programs(original)
    assert f"\n\n[English]({os.path.relpath(english, page.parent)}) | 简体中文\n" in text
    assert f"\n\nEnglish | [简体中文]({os.path.relpath(page, english.parent)})\n" in original


def test_translated_texts_of_the_configuration_page_name_the_same_values():
    def names(text: str) -> set[str]:
        return {" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)}

    for key, (english, chinese) in pages.translations().items():
        assert not chinese or names(english) == names(chinese), key


def test_generated_tables_have_chinese_words_and_links_of_their_page():
    table = "| attention | top-1 % |\n| --- | --- |\n| [Linear attention](../../a.md) | as `soft` |\n"
    assert in_language_of(Path("docs/guide/weights.md"), table) == table
    assert in_language_of(Path("docs/zh/guide/weights.md"), table) == (
        "| 注意力 | top-1（%） |\n| --- | --- |\n| [线性注意力](../../../a.md) | 同 `soft` |\n"
    )


def test_every_key_has_a_meaning_on_the_configuration_page_in_both_languages():
    texts = pages.texts()
    assert all(texts.values())
    assert {key for key, value in dotted_settings(Config().model_dump()) if not isinstance(value, dict)} <= texts.keys()
    for key in {k for b in BACKBONES.list() for k in pages.signature(BACKBONES.get(b))} - Model.model_fields.keys():
        assert f"model.{key}" in texts, f"ppattn/backbones/arguments.yaml does not explain {key}"
    shown = [key for key in texts if not key.startswith(("page.", "type.", "section."))]
    for page in (pages.configuration(chinese=False), pages.configuration(chinese=True)):
        assert [key for key in shown if f"| `{key.rpartition('.')[2]}` |" not in page] == []
    assert "| `ema` | number > 0, < 1 or `null` | `null` | decay per step of a moving average" in pages.configuration()


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
        ("act_proj(x) + mean of V", r"\operatorname{act\_proj}\left(x\right) + \text{ mean of } V"),
    ],
)
def test_formulas_become_latex(text, latex):
    assert formulas.latex(text) == latex


def test_lines_of_formulas_break_at_wide_gaps_and_continue_where_indented():
    block = "    a = b\n        + c,    words beside the formula\n    d = e      (eq. 3)\n"
    assert formulas.rows(block) == [["a = b + c,", r"\text{words beside the formula}"], ["d = e", r"\text{(eq. 3)}"]]


def test_troubleshooting_quotes_messages_of_the_code():
    said = []
    for node in (n for path in (ROOT / "ppattn").rglob("*.py") for n in ast.walk(ast.parse(path.read_text("utf-8")))):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        said.append("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts))
    text = (ROOT / "docs/guide/troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.*?)` \|", text, re.MULTILINE)
    assert len(rows) > 15
    for part in filter(None, (part.strip() for row in rows for part in row.split("…"))):
        assert any(part in text for text in said), part
