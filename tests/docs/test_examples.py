"""Digit scenes against what their files must hold, and the two examples where their environments are set up."""

import json
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import digit_scenes  # noqa: E402

from ppattn.data.sources import digits  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digit_scenes")
    digit_scenes.main(["--output", str(folder), "--train", "5", "--val", "3", "--size", "63"])
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_arguments_write_the_same_files(scenes, tmp_path):
    digit_scenes.main(["--output", str(tmp_path), "--train", "5", "--val", "3", "--size", "63"])
    assert files(scenes) == files(tmp_path)
    assert len(files(tmp_path)) == 2 * (5 + 3 + 3) + 6


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
        mask = cv2.imread(str(scenes / mask), cv2.IMREAD_UNCHANGED)
        assert mask.shape == (size, size)
        left = mask.copy()
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
    assert (len(splits.train), len(splits.val)) == (1437, 360)
    from sklearn.datasets import load_digits

    all_digits = sorted(image.tobytes() for image in np.rint(load_digits().images * (255 / 16)).astype(np.uint8))
    used = [s.image(i)[..., 0].tobytes() for s in (splits.train, splits.val) for i in range(len(s))]
    assert sorted(used) == all_digits, "every digit is in one of the two splits, once"
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
    ("environment", "script", "short", "wrong", "sentence"),
    [
        (".venv-seg", "segmentation/segment.py", ["iters=3", "batch_size=4"],
         "model.backbone.model=swin_nano", "takes four maps"),
        (".venv-det", "detection/detect.py", ["epoch=1", "TrainReader.batch_size=4"],
         "PPAttn.out_indices=[0,2]", "twice"),
    ],
)  # fmt: skip
def test_example_trains_evaluates_exports_and_predicts(tmp_path, environment, script, short, wrong, sentence):
    python = ROOT / environment / "bin/python"
    if not python.exists():
        pytest.skip(f"bash scripts/setup.sh {environment[-3:]} makes the environment for this test")

    def call(path, *arguments):
        command = [python, ROOT / "examples" / path, *arguments]
        process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return process.returncode, process.stdout + process.stderr

    assert call("digit_scenes.py", "--train", "8", "--val", "3")[0] == 0
    config = ROOT / "examples" / Path(script).parent / "digit_scenes.yaml"
    train = [script, "train", "-c", str(config), "--output", "run", "-o", *short]
    code, text = call(*train)
    assert code == 0, text[-3000:]
    (metrics,) = json.loads((tmp_path / "run/metrics.json").read_text()).values()
    assert metrics["images"] == 3
    code, text = call(script, "export", "--run", "run")
    assert code == 0, text[-3000:]
    picture = "data/digit_scenes/images/val_2x_00000.png"
    code, text = call(script, "predict", "--model", "run/export", picture, "--output", "out.png")
    assert code == 0, text[-3000:]
    assert cv2.imread(str(tmp_path / "out.png")) is not None
    code, text = call(*train, wrong)
    assert code == 2 and sentence in text and "Traceback" not in text
