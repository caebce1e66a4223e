"""Tables and pictures that come from run folders, and paired statistics against enumeration by hand."""

import json
import re
import statistics
from itertools import product

import numpy as np
import pytest

from ppattn.config import load_config, to_yaml
from scripts import run_grid
from scripts.tables.__main__ import main as tables
from scripts.tables.cifar10 import at_equal_time, front
from scripts.tables.compare import compare, pooled_deviation
from scripts.tables.runs import Results, Row, local_terms
from scripts.tables.speed import nano_times, read_tokens
from tests.helpers.runs import table

GRID = """tier,cell,config,overrides
1,softmax_deit_nano,deit_nano,
1,inline_deit_nano,deit_nano,model.attention=inline
1,half_hour_inline_deit_nano,deit_nano_muon_15ep,model.attention=inline
1,notebook_32px,notebook_32px,
2,inline_pvt_nano,pvt_nano,model.attention=inline
3,softmax_deit_nano_seed43,deit_nano,train.seed=43
3,softmax_deit_nano_seed44,deit_nano,train.seed=44
4,inline_deit_nano_relu,deit_nano,model.attention=inline model.attention_options.kernel=relu
"""
ENVIRONMENT = {"git_commit": "0123456789", "device_name": "AMD EPYC", "cores": 2}
SPEEDS = {"train": 500, "infer": 9}

ROOT = run_grid.ROOT


def made_up(root, name, top1, macs):
    """A run folder as training leaves it, for a cell of the grid above."""
    cell = next(c for c in run_grid.read_grid(root / "grid.csv") if c.name == name)
    folder = root / "results/cifar10/runs" / name
    folder.mkdir(parents=True)
    config = cell.load()
    (folder / "config.yaml").write_text(to_yaml(config))
    summary = {"top1": top1, "best_top1": 0.99, "epochs": config.train.epochs, "params": 1_234_567, "macs": macs}
    (folder / "summary.json").write_text(json.dumps(summary | {"seconds": 6000}))
    (folder / "env.json").write_text(json.dumps(ENVIRONMENT))
    (folder / "metrics.csv").touch()
    return folder


def test_the_repository_is_what_its_runs_give():
    assert tables(["--check"]) == 0


def test_tables_and_pictures_follow_the_runs(tmp_path, capsys):
    (tmp_path / "grid.csv").write_text(GRID)
    (tmp_path / "README.md").write_text("a\n<!-- table cifar10 -->\nold\n<!-- end -->\nb\n")
    (tmp_path / "docs").mkdir()
    page = [f"<!-- table {name} -->\n<!-- end -->\n" for name in ("cifar10_ablations", "runs", "comparison")]
    (tmp_path / "docs/x.md").write_text("".join(page))
    for seed, top1 in (("", 0.80), ("_seed43", 0.81), ("_seed44", 0.83)):
        made_up(tmp_path, f"softmax_deit_nano{seed}", top1, 40_000_000)
    made_up(tmp_path, "inline_deit_nano", 0.7512, 35_000_000)
    made_up(tmp_path, "inline_deit_nano_relu", 0.7, 35_000_000)
    made_up(tmp_path, "half_hour_inline_deit_nano", 0.8123, 35_000_000)
    made_up(tmp_path, "notebook_32px", 0.9, 35_000_000)  # another recipe
    bench = tmp_path / "results/benchmark"
    bench.mkdir(parents=True)
    (bench / "training.csv").write_text("run,images_per_second\nhalf_hour_inline_deit_nano,250\n")
    speeds = [{"name": "deit_nano softmax", "mode": mode, "images_per_second": n} for mode, n in SPEEDS.items()]
    (bench / "cifar10.json").write_text(json.dumps({"environment": ENVIRONMENT, "rows": speeds}))

    def run(*arguments):
        return tables(list(arguments), tmp_path, tmp_path / "grid.csv"), capsys.readouterr().out

    code, out = run("--check")
    assert code == 1 and "README.md" in out and "x.md" in out and "accuracy_pflop.svg" in out
    assert "old" in (tmp_path / "README.md").read_text() and run()[0] == 0 and run("--check") == (0, "")
    text = (tmp_path / "README.md").read_text()
    epochs = load_config("configs/cifar10/deit_nano.yaml")[0].train.epochs
    assert text.startswith("a\n<!-- table") and text.endswith("<!-- end -->\nb\n")
    # mean 81.33, deviations -1.33, -0.33, 1.67: sqrt((1.78 + 0.11 + 2.78) / 2) = 1.53
    assert f"| `softmax` | 81.33 ± 1.53 | 1.23 M | 40.0 M | {epochs * 100:,} |" in text
    assert "| `inline` | 75.12 | 1.23 M | 35.0 M |  |" in text
    more = (tmp_path / "docs/x.md").read_text()
    assert "`kernel=relu` | 70.00 |" in more
    # one seed and three: sqrt((0.8133 * 0.1867 + 0.7512 * 0.2488) / 10,000 + 0.0153^2 * (1 + 1 / 3)) = 1.86 points
    assert "| 5 epochs, AdamW | `inline` on DeiT | 1 and 3 | -6.21 | -9.85 to -2.57 |  | likely worse |" in more
    link = "[half_hour_inline_deit_nano](runs/half_hour_inline_deit_nano), seed 42, commit 0123456"
    # 750,000 images at 250 a second: 50 minutes; 6 x 35 million operations each: 0.16 PFLOP
    assert f"| {link} | 2 cores of an AMD EPYC | Muon | 15 | 100 | 50 | 0.16 | 81.23 |" in more
    assert "| Adam | 100 | 100 |  | 1.05 | 90.00 |" in more and more.count("90.00") == 1
    assert (tmp_path / "results/cifar10/accuracy_pflop.svg").is_file()

    summary = tmp_path / "results/cifar10/runs/inline_deit_nano/summary.json"
    summary.write_text(summary.read_text().replace("0.7512", "0.7612"))
    code, out = run("--check")
    assert code == 1 and "README.md" in out and "pflop" not in out
    for config in tmp_path.rglob("config.yaml"):  # of another recipe
        config.write_text(config.read_text().replace("label_smoothing: 0.1", "label_smoothing: 0.2"))
    assert run()[0] == 0 and "Not run yet" in (tmp_path / "README.md").read_text()


def tokens(mode):
    """Times as fast as softmax on DeiT-T by attention and number of tokens."""
    found: dict[str, dict[int, float]] = {}
    for row in table(ROOT / "results/benchmark/cells.csv"):
        measured = row["backbone"] == "deit_tiny" and row["mode"] == mode and row["against_softmax"]
        if measured and " " not in row["attention"]:
            found.setdefault(row["attention"], {}).setdefault(int(row["tokens"]), float(row["against_softmax"]))
    return found


def faster(count, *modes):
    return {name for name in tokens("train") if all(tokens(mode)[name][count] > 1 for mode in modes)}


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_front_page_states_what_was_measured(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` (\| \[.*) \|$", text, re.MULTILINE))
    assert f"{len(rows)} attentions" in text or f"{len(rows)} 种注意力" in text
    training, inference = tokens("train"), tokens("infer")
    assert rows.keys() >= training.keys()
    for name, row in rows.items():  # the newest may not be measured yet
        measured = [f"{training[name][count]:.2f}" if name in training else "" for count in (196, 3136)]
        assert row.split(" | ")[-3:-1] == measured

    paragraph = re.search(r"^\*\*.*784 .*(?:\n.+)*", text, re.MULTILINE)[0]
    at_784, rest = re.search(r"784 (.*?)3,136 (.*)", paragraph, re.DOTALL).groups()
    assert {*re.findall(r"`(\w+)`", at_784)} == faster(784, "train", "infer")
    slower = training.keys() - faster(3136, "train") - {"softmax"}
    assert {*re.findall(r"`(\w+)`", rest)} == slower | faster(3136, "train") - faster(3136, "infer") | {"inline"}
    assert all(f"{mode['inline'][3136]:.1f}" in rest for mode in (training, inference))
    rows = read_tokens(Results(ROOT, run_grid.CONFIGS / "grid.csv"), "infer")
    longest = {name: float(own[12544]["ms_per_image"]) for name, own in rows.items() if 12544 in own}
    assert f" {longest['softmax'] / longest['inline']:.0f} " in rest
    assert not faster(196, "train") and not faster(196, "infer"), "softmax is the fastest"


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_front_page_quotes_the_runs(page):
    """The mean of the best long recipe's seeds, the linearised model, and that no difference is significant."""
    text = (ROOT / page).read_text(encoding="utf-8")
    results = (ROOT / "results/cifar10/README.md").read_text(encoding="utf-8")

    def top1(run):
        return 100 * json.loads((ROOT / f"results/cifar10/runs/{run}/summary.json").read_text())["top1"]

    long = {run.name: top1(run.name) for run in (ROOT / "results/cifar10/runs").glob("long_*")}
    seeds = [long.pop(f"long_inline_deit_nano_w128{seed}") for seed in ("", "_seed43", "_seed44")]
    figures = [f"{statistics.mean(seeds):.2f}"]
    figures += [f"{top1(f'{name}_deit_nano_muon_{n}'):.2f}" for name in ("inline", "softmax") for n in (256, 1024)]
    nano = nano_times(Results(ROOT, run_grid.CONFIGS / "grid.csv"), "infer")
    figures.append(f" {float(nano['inline', 32, 1024]['against_softmax']):.1f} ")
    dense = {row["attention"]: row["miou_2x"] for row in table(ROOT / "results/dense/segmentation_1024.csv")}
    figures += [dense[name].partition(" ")[0] for name in ("inline", "softmax")]
    timed = [r for r in table(ROOT / "results/dense/speed.csv") if (r["mode"], r["img_size"]) == ("infer", "256x256")]
    figures += [f"{float(row['against_first']):.1f}" for row in timed if row["attention"] == "inline"]
    runs = json.loads((ROOT / "results/linearize/runs.json").read_text())
    chosen, lost = [runs[name] for name in ("linear_42", "inline_256long_42")], []
    for run in chosen:
        test, held_out = run["teacher_test_top1"], run["measured"]["teacher, every image"]
        lost.append(100 * (10 * (test - run["test_top1"]) + 5 * (held_out - run["held_out_top1"])) / 15)
    speed = {(row["img_size"], row["name"] == "teacher"): row["images_per_second"] for row in chosen[1]["cost"]}
    figures += [f"{speed[size, False] / speed[size, True]:.1f}" for size in ("32x32", "64x64")]
    figures += [f" {lost[0]:.1f} ", *(f"{sum(run['steps'].values()):,}" for run in chosen)]
    assert max(long.values()) < seeds[0] and 0 < lost[1] < 0.1 and [one for one in figures if one not in text] == []
    verdicts = re.findall(r"^\| 15 epochs, Muon \|.* \| ([a-z ]+) \|$", results, re.MULTILINE)
    assert len(verdicts) > 15 and set(verdicts) == {"not significant"}, "README and docs/lab/choosing.md say so"


def test_the_page_about_convolutions_states_what_was_measured():
    """[local term, position convolution] on or off; `linear` has no local term."""
    text = " ".join((ROOT / "docs/lab/convolutions.md").read_text(encoding="utf-8").split())
    rows = local_terms(Results(ROOT, run_grid.CONFIGS / "grid.csv").rows)
    found = {name: {key: row.mean for key, row in cells.items()} for name, cells in rows.items()}
    one = (True, False), (False, True)
    alone = [cells[key] - cells[False, False] for cells in found.values() for key in one if key in cells]
    pairs = [cells for cells in found.values() if (True, True) in cells]
    beside = [cells[True, True] - cells[key] for cells in pairs for key in one if key in cells]
    both = [cells[True, True] - cells[False, False] for cells in pairs]
    neither = {name: cells[False, False] for name, cells in found.items()}
    assert f"softmax has {neither.pop('softmax'):.2f} %, and the other thirteen" in text and len(neither) == 13
    assert f"Both add {min(both):.1f} to {max(both):.1f} points" in text
    assert f"between {min(neither.values()):.2f} and {max(neither.values()):.2f} %" in text
    assert f"adds {min(alone):.1f} to {max(alone):.1f} points to the fourteen" in text and len(alone) == 21
    assert f"beside the other one {min(beside):.1f} to +{max(beside):.1f} points" in text and len(beside) == 20


def test_at_equal_time_the_slower_one_is_read_from_its_curve(tmp_path):
    for name, curve in {"inline": "2,0.5\n4,0.8\n", "softmax": "2,0.6\n4,0.9\n"}.items():
        (folder := tmp_path / "results/cifar10/runs" / name).mkdir(parents=True)
        (folder / "metrics.csv").write_text(f"epoch,top1\n1,\n{curve}")
    (tmp_path / "results/benchmark").mkdir()
    inline, softmax = (Row(name, "", "deit_nano", name, (), 4, "muon") for name in ("inline", "softmax"))
    for speed, points in (("1.6", "+12.5"), ("0.5", "-40.0")):  # softmax at epoch 2.5 of 4: 67.5 %; inline at 2: 50 %
        cells = f"backbone,mode,attention,batch,tokens,against_softmax\ndeit_nano,train,inline,32,256,{speed}\n"
        (tmp_path / "results/benchmark/cells.csv").write_text(cells)
        assert at_equal_time(Results(tmp_path, tmp_path), inline, softmax) == points


def test_the_front_of_accuracy_against_cost():
    points = dict(a=(1.0, 80.0), b=(2.0, 79.0), c=(2.0, 85.0), d=(2.0, 85.0), e=(3.0, 84.0), f=(4.0, 86.0))
    assert front(points) in (["a", "c", "f"], ["a", "d", "f"]) and front({}) == []


SIX = [0.011, 0.004, 0.009, -0.002, 0.007, 0.006]


def by_seed(values):
    return dict(enumerate(values, 42))


def test_the_p_value_counts_the_sign_flips_at_least_as_far_from_zero():
    base = np.linspace(0.80, 0.85, 6)
    found = compare(by_seed(base + SIX), by_seed(base))
    sums = [abs(np.dot(signs, SIX)) for signs in product((1, -1), repeat=6)]
    assert found.p == pytest.approx(np.mean([s >= sum(SIX) - 1e-12 for s in sums])) == pytest.approx(4 / 64)
    assert found.verdict == "not significant" and found.difference == pytest.approx(0.035 / 6)
    low, high = found.interval
    assert found.paired == 6 and found.ends == found.interval and -0.002 < low < found.difference < high < 0.011


def test_six_equal_signs_are_significant_and_five_seeds_never():
    base, better = by_seed([0.8] * 6), by_seed([0.81, 0.812, 0.808, 0.811, 0.809, 0.813])
    assert compare(better, base).p == pytest.approx(2 / 64)
    assert compare(better, base).verdict == "better" and compare(base, better).verdict == "worse"
    five = {seed: top1 + 0.01 for seed, top1 in list(better.items())[:5]}
    assert compare(five, base).p is None and compare(five, base).verdict == "likely better"


def test_few_seeds_use_all_seeds_and_the_error_of_the_test_images_and_of_the_seeds():
    """One seed at 80 %: the error of a difference is sqrt(2 * 0.8 * 0.2 / 10,000), 0.57 points."""
    found = compare({42: 0.808}, {42: 0.8})
    assert found.paired == 0 and found.interval is None
    assert found.error == pytest.approx(np.sqrt((0.808 * 0.192 + 0.8 * 0.2) / 10_000))
    assert found.verdict == "not significant" and compare({42: 0.812}, {42: 0.8}).verdict == "likely better"
    assert compare({42: 0.812}, {42: 0.8}, seed_deviation=0.01).verdict == "not significant"
    two = compare({42: 0.812, 43: 0.812}, {42: 0.8, 43: 0.8}, seed_deviation=0.01)  # on the same test images
    assert two.error == pytest.approx(np.sqrt((0.812 * 0.188 + 0.8 * 0.2) / 10_000 + 2 * 0.01**2 / 2))
    lucky = {42: 0.83, 43: 0.79, 44: 0.78}  # the seed in common is the best of three
    found = compare({42: 0.8}, lucky, seed_deviation=0.02)
    assert found.difference == pytest.approx(0)
    assert found.ends == pytest.approx((-1.96 * found.error, 1.96 * found.error))
    assert found.error == pytest.approx(np.sqrt(2 * 0.8 * 0.2 / 10_000 + 0.02**2 * (1 + 1 / 3)))


def test_the_deviation_over_seeds_is_pooled_by_degrees_of_freedom():
    groups = [[0.7, 0.72, 0.74], [0.8, 0.81], [0.5]]
    assert pooled_deviation(groups) == pytest.approx(np.sqrt((2 * 0.02**2 + 0.005**2 * 2) / 3))
    assert pooled_deviation([[0.5]]) == 0
