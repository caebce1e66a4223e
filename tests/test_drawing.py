"""Pictures as a reader sees them: colours, legends, headings, scales, units, formats."""

import re
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import ppattn
from ppattn import zoo
from ppattn.analysis import pictures as analysis
from ppattn.data import Preprocess
from ppattn.plots import curves, evaluation
from ppattn.plots.figure import CHINESE_FONTS, OWN, line_styles, open_figure, shorten_labels, warn_once
from ppattn.zoo.table import main_attention


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn, laid out as they are written."""
    figures = []

    @contextmanager
    def recorded(*arguments, **settings):
        with open_figure(*arguments, **settings) as figure:
            figures.append(figure)
            yield figure

    for module in (evaluation, analysis, curves):
        monkeypatch.setattr(module, "open_figure", recorded)
    return figures


def test_every_attention_has_a_colour_of_its_own():
    facts = zoo.attentions()
    assert set(facts) == set(ppattn.list_attentions())
    assert len({*(row.colour for row in facts.values()), OWN}) == len(facts) + 1


def test_runs_of_one_attention_share_the_colour_and_differ_in_the_line():
    found = line_styles({"a": "inline", "b": "inline", "c": "mine", "d": "softmax"})
    inline, softmax = zoo.attentions()["inline"].colour, zoo.attentions()["softmax"].colour
    assert [found[label]["color"] for label in "abcd"] == [inline, inline, OWN, softmax]
    assert found["a"]["linestyle"] != found["b"]["linestyle"]
    assert main_attention(["softmax", ["softmax", "inline"]]) == "inline" and main_attention("softmax") == "softmax"


def test_what_all_names_share_is_written_once():
    assert shorten_labels(["softmax_deit_nano", "soft_norm_deit_nano"]) == (["softmax", "soft_norm"], "deit_nano")
    assert shorten_labels(["one_run"]) == (["one_run"], "") and shorten_labels(["a_x", "x"]) == (["a_x", "x"], "")


def test_a_picture_is_a_sharp_png_with_an_svg_beside_it(tmp_path):
    with open_figure(tmp_path / "x.png", 3, 2, "title"):
        pass
    with Image.open(tmp_path / "x.png") as image:
        assert image.size == (600, 400)
    assert "<svg" in (tmp_path / "x.svg").read_text()


def test_chinese_names_are_legible(tmp_path):
    from matplotlib.font_manager import get_font_names

    if not any(map(CHINESE_FONTS.search, get_font_names())):
        pytest.skip("no Chinese font is installed")
    for name, title in (("cat", "猫"), ("dog", "狗")):
        with open_figure(tmp_path / f"{name}.png", 2, 1, title):
            pass
    assert (tmp_path / "cat.png").read_bytes() != (tmp_path / "dog.png").read_bytes()  # boxes are all the same


def test_missing_characters_are_told_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("ppattn.plots.figure.CHINESE_FONTS", re.compile("no such font"))
    warn_once.cache_clear()
    for name in ("cat", "猫", "狗"):
        with open_figure(tmp_path / "x.png", 2, 1, name):
            pass
        assert len(caplog.records) == (name != "cat")
    assert "fonts-noto-cjk" in caplog.text


def test_every_run_has_a_scale_of_its_own_and_readable_headings(tmp_path, drawn, monkeypatch):
    norms, real = [], analysis.TwoSlopeNorm
    monkeypatch.setattr(analysis, "TwoSlopeNorm", lambda *ends: norms.append(real(*ends)) or norms[-1])
    maps = {"wide": 1 + 20 * np.linspace(-1, 1, 16), "narrow": 1 + 0.2 * np.linspace(-1, 1, 16)}
    runs = {f"{name}_deit_nano_muon": [("layer 1", [m.reshape(4, 4)] * 2, (4, 4))] for name, m in maps.items()}
    images = [np.zeros((8, 8, 3), np.uint8)] * 2
    analysis.draw_overlays(tmp_path / "x.png", "title", images, ["a", "b"], runs, "label")
    assert [norm.vmax for norm in norms] == pytest.approx([21, 1.2], rel=0.02)
    texts = {text.get_text(): text for text in drawn[0].texts}
    assert {"wide", "narrow", "layer 1"} <= texts.keys() and min(text.get_fontsize() for text in texts.values()) >= 9
    heading = drawn[0].get_suptitle()
    drawn[0].draw_without_rendering()
    box, whole = texts[heading].get_window_extent(), drawn[0].bbox
    assert "scale of their own" in heading.replace("\n", " ") and box.x0 >= whole.x0 and box.x1 <= whole.x1
    assert box.y0 > max(text.get_window_extent().y1 for name, text in texts.items() if name != heading)
    analysis.draw_overlays(tmp_path / "x.png", "of", images, ["a", "b"], {"one": runs["wide_deit_nano_muon"]}, "label")
    assert drawn[1].get_suptitle() == "of"


def test_predictions_are_square_and_confusions_in_percent(tmp_path, drawn):
    labels, predicted = np.array([0, 0, 0, 1]), np.array([0, 0, 1, 1])
    split = SimpleNamespace(labels=labels, image=lambda i: np.full((6, 9, 3), 20 * i, np.uint8))
    evaluation.draw_predictions(tmp_path / "p.png", predicted, split, ["cat", "dog"], Preprocess(8))
    boxes = [axes.get_window_extent() for axes in drawn[0].axes if axes.images]
    assert len(boxes) == 4 and all(box.width == pytest.approx(box.height, rel=1e-3) for box in boxes)
    evaluation.draw_confusion(tmp_path / "c.png", labels, predicted, ["cat", "dog"])
    (axes,) = drawn[1].axes
    assert [text.get_text() for text in axes.texts] == ["66.7", "33.3", "100.0"] and "%" in axes.get_title()


@pytest.mark.parametrize(("name", "turned"), [("{}", 0), ("猫{}", 0), ("automobile{}", 90)])
def test_names_of_classes_are_turned_where_they_do_not_fit(name, turned, tmp_path, drawn):
    labels = np.arange(10)
    evaluation.draw_confusion(tmp_path / "c.png", labels, labels, [name.format(i) for i in labels])
    assert {mark.get_rotation() for mark in drawn[0].axes[0].get_xticklabels()} == {turned}


def test_curves_of_accuracy_are_in_percent(tmp_path, drawn):
    rows = [{"epoch": i, "train_loss": 1.0, "val_loss": 1.0, "top1": 0.4, "top5": 0.9, "lr": 0.1} for i in (1, 2)]
    curves.draw_curves(tmp_path / "curves.png", rows)
    axes = drawn[0].axes[1]
    assert [line.get_ydata()[0] for line in axes.lines] == [40, 90] and "%" in axes.get_title()
    assert all(float(tick).is_integer() for axes in drawn[0].axes for tick in axes.get_xticks()), "whole epochs"
