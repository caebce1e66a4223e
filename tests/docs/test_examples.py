"""Digit scenes against what their files must hold; the dense examples, in their environments or with stand-ins."""

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import cv2
import numpy as np
import pytest
from sklearn.datasets import load_digits

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import digit_scenes  # noqa: E402

from ppattn.data.sources import digits  # noqa: E402
from tests.helpers.runs import table  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """Two folders of the same arguments have the same files."""
    folders, files = [tmp_path_factory.mktemp("digit_scenes") for _ in range(2)], []
    for folder in folders:
        digit_scenes.main(["--output", str(folder), "--train", "5", "--val", "3", "--size", "63"])
        files.append({path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")})
    assert files[0] == files[1] and len(files[0]) == 2 * (5 + 3 + 3) + 6
    return folders[0]


@pytest.mark.parametrize(("name", "count", "size"), [("train", 5, 63), ("val", 3, 63), ("val_2x", 3, 126)])
def test_lists_masks_and_boxes_agree(scenes, name, count, size):
    lines = [line.split(" ") for line in (scenes / f"{name}.txt").read_text().splitlines()]
    coco = json.loads((scenes / "annotations" / f"{name}.json").read_text())
    assert len(lines) == len(coco["images"]) == count
    assert {c["id"]: c["name"] for c in coco["categories"]} == {1 + d: str(d) for d in range(10)}
    assert len({a["id"] for a in coco["annotations"]}) == len(coco["annotations"]) > 0
    for (image, mask), entry in zip(lines, coco["images"], strict=True):
        assert image == f"images/{entry['file_name']}"
        assert cv2.imread(str(scenes / image)).shape == (size, size, 3) == (entry["height"], entry["width"], 3)
        left = cv2.imread(str(scenes / mask), cv2.IMREAD_UNCHANGED)
        assert left.shape == (size, size)
        for a in (a for a in coco["annotations"] if a["image_id"] == entry["id"]):
            x, y, w, h = a["bbox"]
            inside = left[y : y + h, x : x + w]
            own = inside == a["category_id"]
            assert own.sum() == a["area"]
            assert own.any(0).all() or own.any(1).all()
            assert own[0].any() and own[-1].any() and own[:, 0].any() and own[:, -1].any()
            inside[own] = 0
        assert not left.any()


def test_training_and_validation_share_neither_digits_nor_background():
    splits = digits()
    all_digits = np.rint(load_digits().images * (255 / 16)).astype(np.uint8)
    used = [*splits.train.images[..., 0], *splits.val.images[..., 0]]
    assert sorted(map(bytes, used)) == sorted(map(bytes, all_digits)), "every digit is in one of the splits, once"
    columns = np.broadcast_to(np.arange(640)[None, :, None], (427, 640, 3))
    train, val = (set(np.unique(digit_scenes.cut(columns, name))) for name in ("train", "val_2x"))
    assert not train & val and len(val) >= 2 * 128


def test_sizes_that_do_not_fit_are_refused(capsys):
    for arguments in (["--size", "129"], ["--size", "8"], ["--train", "0"]):
        with pytest.raises(SystemExit) as stop:
            digit_scenes.main(arguments)
        assert stop.value.code == 2
    assert "--size must be 48 to 128" in capsys.readouterr().err


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("script", "short", "wrong", "sentence"),
    [
        ("segmentation/segment.py", ["iters=3", "batch_size=4"], "model.backbone.model=swin_nano", "takes four maps"),
        ("detection/detect.py", ["epoch=1", "TrainReader.batch_size=4"], "PPAttn.out_indices=[0,2]", "twice"),
    ],
)
def test_example_trains_evaluates_exports_and_predicts(tmp_path, script, short, wrong, sentence):
    python = ROOT / f".venv-{script[:3]}/bin/python"
    if not python.exists():
        pytest.skip(f"bash scripts/setup.sh {script[:3]} makes the environment for this test")

    def call(path, *arguments):
        command = [python, ROOT / "examples" / path, *arguments]
        process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return process.returncode, process.stdout + process.stderr

    assert call("digit_scenes.py", "--train", "8", "--val", "3")[0] == 0
    config = ROOT / "examples" / Path(script).parent / "digit_scenes.yaml"
    train = [script, "train", "-c", str(config), "--output", "run", "-o", *short]
    predict = ["predict", "--model", "run/export", "data/digit_scenes/images/val_2x_00000.png", "--output", "out.png"]
    for command in (train, [script, "export", "--run", "run"], [script, *predict]):
        code, text = call(*command)
        assert code == 0, text[-3000:]
    (metrics,) = json.loads((tmp_path / "run/metrics.json").read_text()).values()
    assert metrics["images"] == 3 and cv2.imread(str(tmp_path / "out.png")) is not None
    code, text = call(*train, wrong)
    assert code == 2 and sentence in text and "Traceback" not in text


# For examples/compare.py in place of the two environments: writes figures that follow from the run's name.
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
    for scenes in ("digit_scenes", "digit_scenes_128"):
        (tmp_path / "data" / scenes).mkdir(parents=True)
        (tmp_path / "data" / scenes / "val_2x.txt").touch()
    return tmp_path


def compare(project: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, project / "examples/compare.py", *arguments], capture_output=True, text=True)


def calls(project: Path) -> int:
    return len((project / "calls").read_text().splitlines()) if (project / "calls").exists() else 0


def test_every_run_once_and_tables_of_means(project):
    assert compare(project, "seg_inline_0").returncode == 0 and calls(project) == 1
    listed = compare(project, "--list").stdout
    assert listed.count("done") == 1 and listed.count("missing") == 22
    assert compare(project).returncode == 0 and calls(project) == 23
    assert compare(project).returncode == 0 and calls(project) == 23
    results = project / "results/dense"
    means = ("3", "60.0 (50.0 to 70.0)", "35.0 (25.0 to 45.0)")
    found = [tuple(row[key] for key in ("seeds", "miou", "miou_2x")) for row in table(results / "segmentation.csv")]
    assert found == [means] * 3
    found = [(row["attention"], row["ap"], row["ap_2x"]) for row in table(results / "detection.csv")]
    assert found == [("inline", "50.0", "25.0"), ("softmax", "50.0", "25.0")]
    text = (results / "README.md").read_text()
    assert "danielbuechele" in text and "vultilion" in text and "CC BY 2.0" in text
    assert all(f"({picture.name})" in text for picture in results.glob("*.png"))
    yaml = project / "examples/detection/digit_scenes.yaml"
    yaml.write_text(yaml.read_text() + "# another recipe\n")
    assert compare(project).returncode == 0 and calls(project) == 25


def test_wrong_names_and_missing_scenes_get_a_sentence(project):
    process = compare(project, "seg_inlin_0")
    assert process.returncode == 2 and "unknown run seg_inlin_0" in process.stderr
    (project / "data/digit_scenes/val_2x.txt").unlink()
    process = compare(project)
    assert process.returncode == 2 and "examples/digit_scenes.py" in process.stderr
