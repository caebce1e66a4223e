"""examples/compare.py with stand-ins for the two environments: what it runs, repeats, keeps and writes."""

import csv
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

# Writes figures that follow from the run's name.
STAND_IN = """
#!{python}
import json, pathlib, sys
script, verb, *arguments = sys.argv[1:]
if verb == "train":
    with open("calls", "a") as file:
        file.write(" ".join(arguments) + "\\n")
given = dict(zip(arguments, arguments[1:]))
if verb in ("train", "evaluate"):
    run = pathlib.Path(given.get("--output") or given["--run"])
    run.mkdir(parents=True, exist_ok=True)
    path = run / "metrics.json"
    metrics = json.loads(path.read_text()) if path.exists() else {{}}
    part = "val" if verb == "train" else "val_2x"
    value = 0.5 + 0.1 * int(run.name[-1]) - (0.25 if verb == "evaluate" else 0)
    metrics[part] = {{key: value for key in ("miou", "accuracy", "ap", "ap50", "ap75")}}
    path.write_text(json.dumps(metrics))
elif verb == "predict":
    pathlib.Path(given["--output"]).write_bytes(b"picture")
"""


@pytest.fixture
def project(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for task in ("seg", "det"):
        python = tmp_path / f".venv-{task}/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(textwrap.dedent(STAND_IN).lstrip().format(python=sys.executable))
        python.chmod(0o755)
    scenes = tmp_path / "data/digit_scenes"
    scenes.mkdir(parents=True)
    (scenes / "val_2x.txt").write_text("")
    return tmp_path


def compare(project: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, project / "examples/compare.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def calls(project: Path) -> int:
    return len((project / "calls").read_text().splitlines()) if (project / "calls").exists() else 0


def test_every_run_once_and_tables_of_means(project):
    assert compare(project, "seg_inline_0").returncode == 0 and calls(project) == 1
    listed = compare(project, "--list").stdout
    assert listed.count("done") == 1 and listed.count("missing") == 10
    assert compare(project).returncode == 0 and calls(project) == 11
    assert compare(project).returncode == 0 and calls(project) == 11
    results = project / "results/dense"
    rows = list(csv.DictReader((results / "segmentation.csv").read_text().splitlines()))
    assert [row["attention"] for row in rows] == ["inline", "softmax", "polaformer"]
    assert {row["seeds"] for row in rows} == {"3"}
    assert {row["miou"] for row in rows} == {"60.0 (50.0 to 70.0)"}
    assert {row["miou_2x"] for row in rows} == {"35.0 (25.0 to 45.0)"}
    rows = list(csv.DictReader((results / "detection.csv").read_text().splitlines()))
    found = [(row["attention"], row["ap"], row["ap_2x"]) for row in rows]
    assert found == [("inline", "50.0", "25.0"), ("softmax", "50.0", "25.0")]
    text = (results / "README.md").read_text()
    assert "danielbuechele" in text and "vultilion" in text and "CC BY 2.0" in text
    for picture in results.glob("*.png"):
        assert f"({picture.name})" in text
    yaml = project / "examples/detection/digit_scenes.yaml"
    yaml.write_text(yaml.read_text() + "# another recipe\n")
    assert compare(project).returncode == 0 and calls(project) == 13


def test_wrong_names_and_missing_scenes_get_a_sentence(project):
    process = compare(project, "seg_inlin_0")
    assert process.returncode == 2 and "unknown run seg_inlin_0" in process.stderr
    (project / "data/digit_scenes/val_2x.txt").unlink()
    process = compare(project)
    assert process.returncode == 2 and "examples/digit_scenes.py" in process.stderr
