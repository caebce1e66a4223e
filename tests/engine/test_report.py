"""The HTML report of runs: what it says, and that it needs no other file."""

import re
import shutil
from html import unescape

import pytest

from ppattn.cli import main
from ppattn.engine.trainer import train
from ppattn.files.atomic import write_rows
from tests.helpers.abridged import whole
from tests.helpers.runs import read_json, table, tiny

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


def report(output, *given) -> str:
    """The page that `ppattn report` writes."""
    assert main(["report", *map(str, given), "--output", str(output)]) == 0
    return output.read_text()


def test_the_report_shows_the_runs_side_by_side(runs, tmp_path):
    rows = {row[0]: row[1:] for row in rows_of(report(tmp_path / "new" / "report.html", *runs))}
    assert rows["model.attention"] == ["None", "inline"] and rows["optimizer.lr"] == ["0.01", "0.02"]
    assert "data.batch_size" not in rows and "output" not in rows
    names = [f"{folder.parent.name}/run" for folder in runs]
    for name, folder in zip(names, runs, strict=True):
        assert rows[name][1] == f"{100 * read_json(folder / 'summary.json')['best_top1']:.2f}"
    assert [rows[name][0] for name in ("run", *names)] == ["attention", "softmax", "inline"]
    for row in table(runs[0] / "eval/per_class.csv"):
        assert rows[row["class"]] == [f"{100 * float(row['accuracy']):.1f}"]


@pytest.mark.parametrize("heads", [["class", "accuracy"], ["class", "average_precision", "f1_at_half"]])
def test_the_report_reads_classes_that_are_not_ascii_or_absent_and_several_labels(runs, tmp_path, heads):
    shutil.copytree(runs[0], tmp_path / "run")
    write_rows(tmp_path / "run/eval/per_class.csv", [heads, ["猫", 0.5, 0.1], ["absent", None, None]])
    assert ["猫", "50.0"] in rows_of(report(tmp_path / "report.html", tmp_path / "run"))


def test_the_report_needs_no_other_file(runs, tmp_path):
    addresses = re.findall(r'\b(?:src|href)="([^"]+)"', report(tmp_path / "report.html", runs[0]))
    pictures = [address for address in addresses if address.startswith("data:image/png;base64,")]
    assert len(pictures) == 2  # confusion matrix and predictions
    assert all(address.startswith(("data:", "#")) for address in addresses)


def test_every_heading_of_the_chinese_report_is_chinese(runs, tmp_path):
    texts = []
    for language in ("en", "zh"):
        text = unescape(report(tmp_path / "report.html", *runs, "--language", language))
        assert f'<html lang="{language}">' in text
        texts.append(re.findall(r"<(?:h2|th|text|th class=number)\b[^>]*>(.+?)</", text))
    own = {"MACs", *(f"{folder.parent.name}/run" for folder in runs)}
    pairs = [pair for pair in zip(*texts, strict=True) if re.search("[A-Za-z]", pair[0])]
    assert {english for english, chinese in pairs if english == chinese} <= own
    assert ("Curves", "曲线") in pairs and ("training loss", "训练损失") in pairs


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.yaml", "5"), ("config.yaml", "a: &a [*a]"), ("config.yaml", "1: 2"), ("metrics.csv", "epoch,lr\nx,y\n"),
     ("env.json", "[]"), ("env.json", "[" * 9999), ("summary.json", "5"), ("summary.json", '{"best_top1": "much"}'),
     ("summary.json", "{"), ("summary.json", '{"steps": [1]}'), ("eval/metrics.json", "[1]"),
     ("eval/metrics.json", '{"top1": {}}'), ("eval/per_class.csv", "class\nx\n"),
     ("eval/per_class.csv", "class,accuracy\nx,y\n")],
)  # fmt: skip
def test_odd_content_of_a_run_folder_is_one_sentence(runs, name, content, tmp_path, refused):
    shutil.copytree(runs[0], tmp_path / "run")
    (tmp_path / "run" / name).write_text(content)
    message = refused("report", runs[0], tmp_path / "run", "--output", tmp_path / "report.html")
    assert name.rpartition("/")[2] in message and message.count("\n") == 1 and not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("name", ["eval/predictions.png", "env.json", "config.yaml"])
def test_a_link_out_of_a_run_folder_is_not_read(runs, name, tmp_path, refused):
    shutil.copytree(runs[0], tmp_path / "run")
    (tmp_path / "secret").write_text('{"key": "secret"}')
    (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / name).symlink_to(tmp_path / "secret")
    assert "is a link that leads out of" in refused("report", tmp_path / "run", "--output", tmp_path / "report.html")
    (tmp_path / "linked").symlink_to(runs[0])  # a run may lie on another disk
    report(tmp_path / "report.html", tmp_path / "linked")


@pytest.mark.parametrize("name", ["eval/metrics.json", "eval"])
def test_eval_writes_through_no_link_of_a_received_run_folder(runs, name, tmp_path, refused):
    shutil.copytree(runs[1], tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/metrics.json").write_text("mine")
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "run" / name).symlink_to(tmp_path / "mine" / name.partition("/")[2])
    assert "is a link that leads out of" in refused("eval", "--run", tmp_path / "run")
    assert (tmp_path / "mine/metrics.json").read_text() == "mine" and len([*(tmp_path / "mine").iterdir()]) == 1
