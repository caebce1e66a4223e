"""The notebooks: their cells run with few steps, and the outputs that are kept in them are complete and small."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ppattn import benchmark
from tests.helpers.data_sets import cifar_archive, cifar_files

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
FEW = {
    "cifar10_inline": {"OVERRIDE": ["train.max_steps=2", "data.batch_size=8", "data.eval_batch_size=4"]},
    "attention_maps": {"ATTENTIONS": ["softmax", "inline", "soft"]},
    "linearize": {"OVERRIDE": ["train.max_steps=2"]},
}


def cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_run(path, tmp_path, monkeypatch, request):
    """As they stand, but for the values of the cell tagged `parameters`, without Jupyter."""
    if path.stem != "attention_maps":
        request.getfixturevalue("unabridged")  # they show the pictures of a run
    shown: list[bytes] = []
    jupyter = SimpleNamespace(version_info=(9, 0), get_ipython=lambda: None)  # matplotlib asks for these
    display = SimpleNamespace(Image=lambda file: shown.append(Path(file).read_bytes()))
    for name, module in (("IPython", jupyter), ("IPython.display", display)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setattr(benchmark, "PIXELS", (1,))  # speeds at one size
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    files, *_ = cifar_files()
    cifar_archive(tmp_path / "data/cifar10/cifar-10-python.tar.gz", files)
    scope: dict = {}
    for cell in cells(path):
        exec(compile("".join(cell["source"]), path.name, "exec"), scope)
        if "parameters" in cell["metadata"].get("tags", []):
            assert FEW[path.stem].keys() <= scope.keys()
            scope |= FEW[path.stem]
    if path.stem == "attention_maps":
        assert list(scope["maps"]) == FEW[path.stem]["ATTENTIONS"]
    else:
        assert shown and all(picture.startswith(b"\x89PNG") for picture in shown)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_outputs_are_complete_and_small(path):
    assert path.stat().st_size < 400_000
    code = cells(path)
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = "".join("".join(output.get("text", "")) for output in outputs)
    assert text.count("\n") < 120 and "\r" not in text
