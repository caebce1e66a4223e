"""The HTML report of runs: what it says, and that it needs no other file."""

import json
import re
import shutil
from html import unescape

import pytest

from ppattn.cli import main
from ppattn.engine.trainer import train
from ppattn.files.atomic import write_rows
from tests.helpers.abridged import whole
from tests.helpers.runs import tiny

pytestmark = pytest.mark.slow


def rows_of(page: str) -> list[list[str]]:
    """The cells of all tables as text."""
    rows = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>.*?</tr>", page)]
    return [[unescape(re.sub("<[^>]*>", "", cell)) for cell in row] for row in rows]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs that differ in two keys; only the first is evaluated."""
    folders = [tmp_path_factory.mktemp(name) / "run" for name in ("first", "second <b>")]
    train(tiny(folders[0]))
    train(tiny(folders[1], model={"attention": "inline"}, optimizer={"lr": 0.02}))
    with whole():
        assert main(["eval", "--run", str(folders[0])]) == 0
    return folders


def test_the_report_shows_the_runs_side_by_side(runs, tmp_path):
    output = tmp_path / "new" / "report.html"
    assert main(["report", *map(str, runs), "--output", str(output)]) == 0
    rows = {row[0]: row[1:] for row in rows_of(output.read_text())}
    assert rows["model.attention"] == ["None", "inline"] and rows["optimizer.lr"] == ["0.01", "0.02"]
    assert "data.batch_size" not in rows and "output" not in rows
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in runs]
    names = [f"{folder.parent.name}/run" for folder in runs]
    for name, summary in zip(names, summaries, strict=True):
        assert rows[name][1] == f"{100 * summary['best_top1']:.2f}"
    assert [rows[name][0] for name in ("run", *names)] == ["attention", "softmax", "inline"]
    accuracy = [line.split(",") for line in (runs[0] / "eval" / "per_class.csv").read_text().splitlines()[1:]]
    assert [rows[line[0]] for line in accuracy] == [[f"{100 * float(line[2]):.1f}"] for line in accuracy]


def test_the_report_reads_classes_that_are_not_ascii(runs, tmp_path):
    shutil.copytree(runs[0], tmp_path / "run")
    write_rows(tmp_path / "run/eval/per_class.csv", [["class", "accuracy"], ["猫", 0.5]])
    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "report.html")]) == 0
    assert ["猫", "50.0"] in rows_of((tmp_path / "report.html").read_text())


def test_the_report_needs_no_other_file(runs, tmp_path):
    output = tmp_path / "report.html"
    main(["report", str(runs[0]), "--output", str(output)])
    addresses = re.findall(r'\b(?:src|href)="([^"]+)"', output.read_text())
    pictures = [address for address in addresses if address.startswith("data:image/png;base64,")]
    assert len(pictures) == 2  # confusion matrix and predictions
    assert all(address.startswith(("data:", "#")) for address in addresses)


def test_every_heading_of_the_chinese_report_is_chinese(runs, tmp_path):
    texts = {}
    for language in ("en", "zh"):
        output = tmp_path / f"{language}.html"
        assert main(["report", *map(str, runs), "--output", str(output), "--language", language]) == 0
        text = unescape(output.read_text())
        assert f'<html lang="{language}">' in text
        texts[language] = re.findall(r"<(?:h2|th|text|th class=number)\b[^>]*>(.+?)</", text)
    own = {"MACs", *(f"{folder.parent.name}/run" for folder in runs)}
    pairs = [pair for pair in zip(*texts.values(), strict=True) if re.search("[A-Za-z]", pair[0])]
    assert {english for english, chinese in pairs if english == chinese} <= own
    assert ("Curves", "曲线") in pairs and ("training loss", "训练损失") in pairs


@pytest.mark.parametrize("damage", ["no run", "damaged"])
def test_a_folder_that_is_no_run_is_an_error(runs, damage, tmp_path, capsys):
    folder = tmp_path / "broken"
    folder.mkdir()
    if damage == "damaged":
        for name in ("config.yaml", "metrics.csv"):
            (folder / name).write_bytes((runs[0] / name).read_bytes())
        (folder / "summary.json").write_text("{")
    assert main(["report", str(runs[0]), str(folder), "--output", str(tmp_path / "report.html")]) == 2
    assert str(folder) in capsys.readouterr().err and not (tmp_path / "report.html").exists()


ODD = [
    ("config.yaml", "5"), ("config.yaml", "a: &a [*a]"), ("config.yaml", "1: 2"), ("metrics.csv", "epoch,lr\nx,y\n"),
    ("env.json", "[]"), ("env.json", "[" * 9999), ("summary.json", "5"), ("summary.json", '{"best_top1": "much"}'),
    ("summary.json", '{"steps": [1]}'), ("eval/metrics.json", "[1]"), ("eval/metrics.json", '{"top1": {}}'),
    ("eval/per_class.csv", "class\nx\n"), ("eval/per_class.csv", "class,accuracy\nx,y\n"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content"), ODD)
def test_odd_content_of_a_run_folder_is_one_sentence(runs, name, content, tmp_path, capsys):
    shutil.copytree(runs[0], tmp_path / "run")
    (tmp_path / "run" / name).write_text(content)
    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "report.html")]) == 2
    message = capsys.readouterr().err
    assert name.rpartition("/")[2] in message and message.count("\n") == 1


@pytest.mark.parametrize("name", ["eval/predictions.png", "env.json", "config.yaml"])
def test_a_link_out_of_a_run_folder_is_not_read(runs, name, tmp_path, capsys):
    shutil.copytree(runs[0], tmp_path / "run")
    (tmp_path / "secret").write_text('{"key": "secret"}')
    (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / name).symlink_to(tmp_path / "secret")
    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "report.html")]) == 2
    assert "is a link that leads out of" in capsys.readouterr().err
    (tmp_path / "linked").symlink_to(runs[0])  # a run may lie on another disk
    assert main(["report", str(tmp_path / "linked"), "--output", str(tmp_path / "report.html")]) == 0


def test_the_report_replaces_no_file_of_a_run(runs, capsys):
    before = (runs[0] / "config.yaml").read_bytes()
    assert main(["report", str(runs[0]), "--output", str(runs[0] / "config.yaml")]) == 2
    assert "is what this call reads" in capsys.readouterr().err and (runs[0] / "config.yaml").read_bytes() == before


@pytest.mark.parametrize("name", ["eval/metrics.json", "eval"])
def test_eval_writes_through_no_link_of_a_received_run_folder(runs, name, tmp_path, capsys):
    shutil.copytree(runs[1], tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/metrics.json").write_text("mine")
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "run" / name).symlink_to(tmp_path / "mine" / name.partition("/")[2])
    assert main(["eval", "--run", str(tmp_path / "run")]) == 2
    assert "is a link that leads out of" in capsys.readouterr().err
    assert (tmp_path / "mine/metrics.json").read_text() == "mine" and len([*(tmp_path / "mine").iterdir()]) == 1
