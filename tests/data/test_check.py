"""The verb `check` and the script that writes shards."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ppattn.cli import main
from ppattn.data import build_datasets
from ppattn.errors import UserError
from tests.helpers.data_sets import cifar_archive, cifar_files, config, write_image

ROOT = Path(__file__).resolve().parents[2]


def test_check_finds_nothing_in_good_data(folder, capsys):
    assert main("check", ["--data", str(folder)]) == 0
    output = capsys.readouterr().out
    assert "train: 15 images, 5 to 5 per class" in output and "nothing wrong" in output


def test_check_lists_all_that_is_wrong(damaged, folder, capsys, tmp_path):
    (folder / "train" / "dog").mkdir()
    write_image(folder / "val" / "ant" / "copy.png", [0, 0, 3], (14, 9, 3))  # train/ant/3.png
    write_image(folder / "train" / "cat" / "again.png", [0, 2, 1], (12, 11, 3))
    (folder / "val" / "ant" / "0.png").write_bytes((folder / "val" / "ant" / "0.png").read_bytes()[:-30])
    report_file = tmp_path / "reports" / "check.json"
    assert main("check", ["--data", str(folder), "--json", str(report_file)]) == 2
    captured = capsys.readouterr()
    assert "error: the data has the problems" in captured.err
    report = json.loads(report_file.read_text())
    assert report["ok"] is False
    unreadable = {part: sorted(Path(e["name"]).name for e in report[part]["unreadable"]) for part in ("train", "val")}
    assert unreadable == {"train": ["1.png", "2.png"], "val": ["0.png", "2.png"]}
    assert report["train"]["empty_classes"] == ["dog"] and report["val"]["empty_classes"] == ["dog"]
    assert report["train"]["images_per_class"] == {"ant": 5, "bee": 5, "cat": 6, "dog": 0}
    assert [[Path(n).name for n in pair] for pair in report["duplicates"]] == [["3.png", "copy.png"]]
    assert report["train"]["copies_within"] == 1
    for words in ("bee/1.png", "dog", "copy.png", "unreadable in val: 2"):
        assert words in captured.out


def test_check_takes_configs_shards_and_archives(shards, folder, tmp_path, capsys):
    root, _ = shards
    assert main("check", ["--data", str(root)]) == 2  # the same images in both splits
    assert "in both splits: 61" in capsys.readouterr().out
    (tmp_path / "c.yaml").write_text(f"data: {{name: folder, root: {folder}}}\n")
    assert main("check", ["-c", str(tmp_path / "c.yaml")]) == 0
    assert main("check", ["-c", str(tmp_path / "c.yaml"), "-o", "data.val=train"]) == 2
    files, _, _ = cifar_files()
    archive = cifar_archive(tmp_path / "cifar-10-python.tar.gz", files)
    assert main("check", ["--data", str(archive)]) == 0
    assert "train: 20 images" in capsys.readouterr().out
    assert main("check", ["--data", str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err


@pytest.mark.slow
def test_make_shards_script(folder, tmp_path):
    script = [sys.executable, ROOT / "scripts" / "make_shards.py"]
    arguments = ["--data", folder, "--output", tmp_path / "out", "--per-shard", "4"]
    done = subprocess.run([*script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and "train: 15 images in 4 shards" in done.stdout
    splits = build_datasets(config("shards", tmp_path / "out"))
    assert splits.classes == ["ant", "bee", "cat"] and np.bincount(splits.train.labels).tolist() == [5, 5, 5]
    again = subprocess.run([*script, *arguments], capture_output=True, text=True)
    assert again.returncode == 2 and "already has shards" in again.stderr


@pytest.fixture
def photos(tmp_path):
    """Class folders without train/ and val/."""
    for number in range(12):
        write_image(tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{number}.png", number)
    return tmp_path / "photos"


def test_class_folders_need_no_train_and_val(photos, capsys):
    splits = build_datasets(config("folder", photos, holdout=4))
    assert (len(splits.train), len(splits.val), splits.classes) == (8, 4, ["cat", "dog"])
    keys = [[split.key(i) for i in range(len(split))] for split in (splits.train, splits.val)]
    assert sorted(keys[0] + keys[1]) == sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))
    with pytest.raises(UserError, match="data.holdout = N"):
        build_datasets(config("folder", photos))
    assert main("check", ["--data", str(photos)]) == 0
    assert "train: 12 images, 6 to 6 per class" in capsys.readouterr().out


def test_check_takes_overrides_of_a_folder(photos, capsys):
    assert main("check", ["--data", str(photos), "-o", "data.holdout=4"]) == 0
    assert "val: 4 images, 2 to 2 per class" in capsys.readouterr().out
    assert main("check", ["--data", str(photos), "-o", "data.holdot=4"]) == 2
    assert "Did you mean 'data.holdout'?" in capsys.readouterr().err
