"""The code in the README and the docs runs as printed, and the pages name only what is there."""

import re
from pathlib import Path

import paddle
import pytest

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


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.S)


@pytest.mark.slow
def test_readme_example_runs():
    (code,) = python_blocks(ROOT / "README.md")
    scope: dict = {}
    exec(code, scope)
    assert scope["model"](scope["images"]).shape == [2, 10]
    assert [m.shape[2] for m in scope["swin"].forward_features(scope["images"])] == [56, 28, 14, 7]
    assert scope["layer"](paddle.zeros([1, 196, 192])).shape == [1, 196, 192]


@pytest.mark.slow
def test_dense_prediction_example_trains_one_step():
    (code,) = python_blocks(DOCS / "guide/dense_prediction.md")
    scope: dict = {}
    exec(code, scope)
    assert scope["model"](scope["images"]).shape == [2, 19, 96, 128]
    grads = {name: p.grad for name, p in scope["model"].named_parameters()}
    reached = [name for name, grad in grads.items() if grad is not None and float(grad.abs().max()) > 0]
    assert any(name.startswith("backbone.stages.0.") for name in reached)
    assert any(name.startswith("backbone.stages.3.") for name in reached)


@pytest.mark.slow
def test_training_from_python_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = python_blocks(DOCS / "guide/train.md")
    scope: dict = {}
    exec(code, scope)
    assert scope["summary"]["epochs"] == 1 and (tmp_path / "runs/from_python/checkpoints/best.safetensors").exists()


def test_examples_of_the_models_page_run():
    (code,) = python_blocks(DOCS / "guide/models.md")
    scope: dict = {}
    exec(code, scope)
    assert scope["model"].block_names()


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
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if "://" not in target:
            place = page.parent / target if target else page
            assert place.exists(), target
            assert not anchor or place.suffix != ".md" or anchor in anchors(place), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES + CHINESE, ids=name_of)
def test_pages_name_only_what_is_there(page):
    folders = "ppattn|configs|tools|scripts|results|tests|examples|docs"
    for name in re.findall(rf"\b(?:{folders})/[\w./-]*\w", page.read_text()):
        placeholder = re.search(r"VERB|VENDOR", name)
        assert placeholder or (ROOT / name).exists(), f"{page.name} names {name}"
