"""The code in the README and the docs runs as it stands, and every page can be found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.S)


@pytest.mark.slow
def test_readme_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = python_blocks(ROOT / "README.md")
    scope: dict = {}
    exec(code, scope)
    assert scope["model"](scope["images"]).shape == [2, 10]
    assert (tmp_path / "exported" / "model.json").exists()


@pytest.mark.slow
def test_dense_prediction_example_trains_one_step():
    (code,) = python_blocks(DOCS / "dense_prediction.md")
    scope: dict = {}
    exec(code, scope)
    assert scope["model"](scope["images"]).shape == [2, 19, 96, 128]
    grads = {name: p.grad for name, p in scope["model"].named_parameters()}
    reached = [name for name, grad in grads.items() if grad is not None and float(grad.abs().max()) > 0]
    assert any(name.startswith("backbone.stages.0.") for name in reached)
    assert any(name.startswith("backbone.stages.3.") for name in reached)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_readme_links_every_page(page):
    assert f"(docs/{page.name})" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), f"{page.name} links {target}"
