"""Tables and pictures that come from run folders."""

from __future__ import annotations

import json
import shutil

from ppattn.config import load_config, to_yaml
from scripts import make_tables, run_grid

GRID = """tier,cell,config,overrides
1,softmax_deit_nano,softmax_deit_nano,
1,inline_deit_nano,inline_deit_nano,
1,half_hour_inline_deit_nano,half_hour_inline_deit_nano,
1,notebook_32px,notebook_32px,
2,inline_pvt_nano,inline_pvt_nano,
3,softmax_deit_nano_seed43,softmax_deit_nano,train.seed=43
3,softmax_deit_nano_seed44,softmax_deit_nano,train.seed=44
4,inline_deit_nano_relu,inline_deit_nano,model.attention_options.kernel=relu
"""


def made_up(root, name, top1, macs):
    """A run folder as training leaves it, for a cell of the grid above."""
    cell = next(c for c in run_grid.read_grid(root / "grid.csv") if c.name == name)
    folder = root / "results/cifar10" / name
    folder.mkdir(parents=True)
    config = cell.load()
    (folder / "config.yaml").write_text(to_yaml(config))
    summary = {"top1": top1, "best_top1": 0.99, "epochs": config.train.epochs, "params": 1_234_567, "macs": macs}
    (folder / "summary.json").write_text(json.dumps(summary))
    for rest in ("metrics.csv", "curves.png", "env.json"):
        (folder / rest).touch()
    return folder


def test_the_repository_is_what_its_runs_give():
    assert make_tables.main(["--check"]) == 0


def test_tables_and_pictures_follow_the_runs(tmp_path, capsys):
    (tmp_path / "grid.csv").write_text(GRID)
    (tmp_path / "README.md").write_text("a\n<!-- table cifar10 -->\nold\n<!-- end -->\nb\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/x.md").write_text(
        "<!-- table cifar10_ablations -->\n<!-- end -->\n<!-- table cifar10_half_hour -->\n<!-- end -->\n"
        "<!-- table cifar10_long -->\n<!-- end -->\n<!-- table comparison -->\n<!-- end -->\n"
        "<!-- table verdicts -->\n<!-- end -->\n"
    )
    for seed, top1 in (("", 0.80), ("_seed43", 0.81), ("_seed44", 0.83)):
        made_up(tmp_path, f"softmax_deit_nano{seed}", top1, 40_000_000)
    made_up(tmp_path, "inline_deit_nano", 0.7512, 35_000_000)
    made_up(tmp_path, "inline_deit_nano_relu", 0.7, 35_000_000)
    made_up(tmp_path, "half_hour_inline_deit_nano", 0.8123, 35_000_000)
    made_up(tmp_path, "notebook_32px", 0.9, 35_000_000)  # another recipe
    short = tmp_path / "results/benchmark/training/half_hour_inline_deit_nano"
    short.mkdir(parents=True)
    (short / "summary.json").write_text(json.dumps({"images_per_second": 250}))
    bench = tmp_path / "results/benchmark/cifar10"
    bench.mkdir(parents=True)
    (bench / "benchmark.csv").write_text(
        "name,mode,images_per_second,slowest_round,fastest_round\n"
        "deit_nano softmax,train,500,430,550\ndeit_nano softmax,infer,9,1,90\n"
    )
    (bench / "benchmark.json").write_text(json.dumps({"environment": {"cores": 2, "device_name": "Some CPU"}}))

    def run(*arguments):
        code = make_tables.main(list(arguments), tmp_path, tmp_path / "grid.csv")
        return code, capsys.readouterr().out

    code, out = run("--check")
    assert code == 1 and "README.md" in out and "x.md" in out and "accuracy_macs.png" in out
    assert "old" in (tmp_path / "README.md").read_text()
    assert run()[0] == 0 and run("--check") == (0, "")
    text = (tmp_path / "README.md").read_text()
    epochs = load_config("configs/cifar10/softmax_deit_nano.yaml")[0].train.epochs
    assert "its rounds are within 14 % of the median" in text
    assert text.startswith("a\n<!-- table") and text.endswith("<!-- end -->\nb\n")
    # mean 81.33, deviations -1.33, -0.33, 1.67: sqrt((1.78 + 0.11 + 2.78) / 2) = 1.53
    assert f"| `softmax` | 81.33 ± 1.53 |  |  | 1.23 M | 40.0 M | {epochs * 100:,} |" in text
    assert "over 3 seeds; one seed where there is no ±." in text
    assert "| `inline` | 75.12 |  |  | 1.23 M | 35.0 M |  |" in text and "Some CPU" in text
    more = (tmp_path / "docs/x.md").read_text()
    assert "`kernel=relu` | 70.00 |" in more
    # one seed and three: sqrt((0.8133 * 0.1867 + 0.7512 * 0.2488) / 10,000 + 0.0153^2 * (1 + 1 / 3)) = 1.86 points
    assert "| 5 epochs, AdamW | `inline` on DeiT | 1 and 3 | -6.21 | -9.85 to -2.57 |  | likely worse |" in more
    likely = "- 5 epochs, AdamW, **likely worse than softmax**: `inline` (DeiT, -6.2).\n"
    assert f"-->\n- **Better or worse than softmax** with certainty: none.\n{likely}" in more
    line = (
        "| `half_hour_inline_deit_nano` | `inline` on DeiT | Muon | 15 | 50 | 81.23 |"  # 750,000 images at 250 a second
    )
    assert line in more and more.count("81.23") == 1
    assert "| `notebook_32px` | `inline` on DeiT | Adam | 100 |  | 90.00 |" in more and more.count("90.00") == 1
    assert (tmp_path / "results/cifar10/accuracy_seconds.png").is_file()

    summary = tmp_path / "results/cifar10/inline_deit_nano/summary.json"
    summary.write_text(summary.read_text().replace("0.7512", "0.7612"))
    code, out = run("--check")
    assert code == 1 and "README.md" in out and "accuracy_macs.png" in out and "seconds" not in out
    shutil.rmtree(summary.parent)
    assert run()[0] == 0 and "`inline`" not in (tmp_path / "README.md").read_text()


def test_runs_of_another_recipe_do_not_count(tmp_path):
    (tmp_path / "grid.csv").write_text(GRID)
    (tmp_path / "README.md").write_text("<!-- table cifar10 -->\n<!-- end -->\n")
    folder = made_up(tmp_path, "inline_deit_nano", 0.75, 1)
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("label_smoothing: 0.1", "label_smoothing: 0.2"))
    assert make_tables.main([], tmp_path, tmp_path / "grid.csv") == 0
    assert "not finished" in (tmp_path / "README.md").read_text()
    assert not list(tmp_path.rglob("accuracy_*.png"))


def test_local_terms_and_the_arithmetic_of_the_longer_recipe(tmp_path):
    (tmp_path / "grid.csv").write_text(
        "tier,cell,config,overrides\n"
        "1,softmax,half_hour_softmax_deit_nano,\n"
        "1,softmax_seed43,half_hour_softmax_deit_nano,train.seed=43\n"
        "1,softmax_no_cpe,half_hour_softmax_deit_nano,model.cpe=false\n"
        "1,softmax_local,half_hour_softmax_deit_nano,model.attention_options.residual=true\n"
        "1,plain,half_hour_softmax_deit_nano,model.stem=patch model.class_token=true model.cpe=false\n"
        "1,tenth,half_hour_softmax_deit_nano,data.holdout=45000 train.epochs=50 train.eval_every=50\n"
        "1,mala,half_hour_softmax_deit_nano,model.attention=mala\n"
        "1,mala_off,half_hour_softmax_deit_nano,"
        "model.attention=mala model.attention_options.local_term=false model.cpe=false\n"
        "1,nystromformer,half_hour_softmax_deit_nano,"
        "model.attention=nystromformer model.attention_options.num_landmarks=16\n"
        '1,mhla,half_hour_softmax_deit_nano,model.attention=mhla optimizer.lr_scale={"*.mixing":0.1}\n'
    )
    (tmp_path / "README.md").write_text(
        "<!-- table recipe -->\n<!-- end -->\n<!-- table local_terms -->\n<!-- end -->\n"
        "<!-- table plain_deit -->\n<!-- end -->\n<!-- table local_gains -->\n<!-- end -->\n"
    )
    accuracies = {"softmax": 0.85, "softmax_seed43": 0.86, "softmax_no_cpe": 0.8, "softmax_local": 0.87, "mala": 0.84}
    others = {"mala_off": 0.7, "plain": 0.6, "nystromformer": 0.83, "mhla": 0.82}
    for name, top1 in (accuracies | others).items():
        made_up(tmp_path, name, top1, 40_000_000)
    assert make_tables.main([], tmp_path, tmp_path / "grid.csv") == 0
    text = (tmp_path / "README.md").read_text()
    # 6 * 40 M MACs * 15 epochs * 50,000 images = 0.18e15
    assert "| `softmax` | 85.50 ± 0.71 |  |  | 2 | 1.23 M | 0.180 |" in text
    assert "| `softmax` | 87.00 |  | 85.50 ± 0.71 | 80.00 |" in text
    assert "| `mala` | 84.00 |  |  | 70.00 |" in text
    # two seeds and one, `cpe`: sqrt((0.855 * 0.145 + 0.8 * 0.2) / 10,000 + 0.0071^2 * (1 / 2 + 1)) = 1.02 points
    assert "| `softmax` | +1.5 (-0.4 to +3.4) |  |  | +5.5 (+3.5 to +7.5) | +7.0 (+4.8 to +9.2) |  |" in text
    # one seed each: 1.96 * sqrt((0.7 * 0.3 + 0.8 * 0.2) / 10,000 + 2 * 0.0071^2) = 2.3 points
    assert "| `mala` |  |  |  |  | +14.0 (+11.7 to +16.3) | -10.0 (-12.3 to -7.7) |" in text
    assert "\nWithout both, told apart from `softmax`: `mala` (likely worse).\n" in text
    assert "| `softmax` | 60.00 | 1.23 M | 0.180 |" in text and text.count("60.00") == 1
    # a tenth of the images: in no picture, so that nothing is drawn again
    picture = (tmp_path / "results/cifar10/accuracy_pflop.png").stat().st_mtime_ns
    made_up(tmp_path, "tenth", 0.6, 40_000_000)
    assert make_tables.main([], tmp_path, tmp_path / "grid.csv") == 0
    assert (tmp_path / "results/cifar10/accuracy_pflop.png").stat().st_mtime_ns == picture
    # what single attentions need in this recipe: in its table, but no ablation
    for exception in ("| `nystromformer` | 83.00 |", "| `mhla` | 82.00 |"):
        assert text.count(exception) == 1
    # nothing is said of what was not compared
    shutil.rmtree(tmp_path / "results/cifar10/softmax_no_cpe")
    assert make_tables.main([], tmp_path, tmp_path / "grid.csv") == 0
    text = (tmp_path / "README.md").read_text()
    assert "| `mala` |  |  |  |  | +14.0 (" in text and "Without both" not in text


def test_what_six_seeds_tell_apart_stands_first(tmp_path):
    seeds = range(42, 48)
    lines = ["tier,cell,config,overrides"]
    for name, change in (("softmax", ""), ("linear", "model.attention=linear "), ("less", "model.attention=less ")):
        lines += [f"1,{name}_{seed},half_hour_softmax_deit_nano,{change}train.seed={seed}" for seed in seeds]
    (tmp_path / "grid.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "README.md").write_text(
        "<!-- table summary -->\n<!-- end -->\n<!-- table verdicts -->\n<!-- end -->\n"
        "<!-- table comparison -->\n<!-- end -->\n"
    )
    (tmp_path / "README.zh.md").write_text("<!-- table summary_zh -->\n<!-- end -->\n")
    for seed, noise in zip(seeds, (0.001, -0.002, 0.003, 0.001, 0.001, 0.002), strict=True):
        made_up(tmp_path, f"softmax_{seed}", 0.85, 1)
        made_up(tmp_path, f"linear_{seed}", 0.85 + noise, 1)
        made_up(tmp_path, f"less_{seed}", 0.83 + noise, 1)
    assert make_tables.main([], tmp_path, tmp_path / "grid.csv") == 0
    text = (tmp_path / "README.md").read_text()
    start = "After 15 epochs with Muon, 3 attentions on DeiT reach 83.1 to 85.1 %, softmax 85.0 % (6 seeds). "
    assert f"{start}Better or worse than softmax with certainty: `less` (-1.9); likely, in points: none." in text
    first = "-->\n- 15 epochs, Muon, **worse than softmax**: `less` (DeiT, -1.9, 95 % interval -2.0 to -1.8).\n"
    assert f"{first}- 15 epochs, Muon, **not told apart from softmax**: `linear` (DeiT, +0.1, 95 % interval " in text
    assert "| `less` on DeiT | 6 pairs | -1.90 | -2.03 to -1.78 | 0.031 | worse |" in text
    chinese = (tmp_path / "README.zh.md").read_text()
    assert "83.1% 至 85.1%" in chinese and "确定更好或更差的：`less` (-1.9)；" in chinese
    for folder in (tmp_path / "results/cifar10").glob("less_*"):
        shutil.rmtree(folder)
    assert make_tables.main([], tmp_path, tmp_path / "grid.csv") == 0
    assert "(6 seeds). None is told apart from softmax.\n" in (tmp_path / "README.md").read_text()


def test_the_front_of_accuracy_against_cost():
    points = {
        "a": (1.0, 80.0),
        "b": (2.0, 79.0),
        "c": (2.0, 85.0),
        "d": (2.0, 85.0),
        "e": (3.0, 84.0),
        "f": (4.0, 86.0),
    }
    assert make_tables.front(points) in (["a", "c", "f"], ["a", "d", "f"])
    assert make_tables.front({}) == []


def test_what_inference_costs_stands_beside_accuracy(tmp_path):
    (tmp_path / "grid.csv").write_text(
        "tier,cell,config,overrides\n"
        "1,softmax,half_hour_softmax_deit_nano,\n"
        "1,mala,half_hour_softmax_deit_nano,model.attention=mala\n"
        "1,linear,half_hour_softmax_deit_nano,model.attention=linear\n"
        "1,nystromformer,half_hour_softmax_deit_nano,"
        "model.attention=nystromformer model.attention_options.num_landmarks=16\n"
        "1,ablation,half_hour_softmax_deit_nano,model.cpe=false\n"
    )
    (tmp_path / "README.md").write_text("<!-- table fronts -->\n<!-- end -->\n")
    accuracies = {"softmax": 0.85, "mala": 0.84, "linear": 0.8, "nystromformer": 0.83, "ablation": 0.9}
    for name, top1 in accuracies.items():
        made_up(tmp_path, name, top1, 40_000_000)
    bench = tmp_path / "results/benchmark/cifar10_infer"
    bench.mkdir(parents=True)
    (bench / "benchmark.csv").write_text(
        "name,mode,ms_per_image,step_mb\n"
        "softmax_deit_nano_cifar10,infer,0.5,300\nmala_deit_nano_cifar10,infer,0.7,250\n"
        "softmax_deit_nano_cifar10,train,9,999\nnystromformer_deit_nano_cifar10,infer,0.8,100\n"
    )
    assert make_tables.main([], tmp_path, tmp_path / "grid.csv") == 0
    text = (tmp_path / "README.md").read_text()
    assert "| `softmax` | 85.00 | 0.50 | yes | 300 | yes |" in text
    assert "| `nystromformer` | 83.00 | 0.80 |  | 100 | yes |" in text
    assert "| `mala` | 84.00 | 0.70 |  | 250 | yes |" in text and "linear" not in text and "90.00" not in text
    assert (tmp_path / "results/cifar10/accuracy_inference.png").is_file()


def test_accuracies_under_corruption_are_means_of_three_strengths(tmp_path):
    path = tmp_path / "corruptions.csv"
    path.write_text(
        "model,corruption,strength,top1,images\n"
        "m_deit_nano_cifar10,jpeg,2,0.7,10000\nm_deit_nano_cifar10,jpeg,1,0.8,10000\nm_deit_nano_cifar10,jpeg,3,0.6,10000\n"
        "m_deit_nano_cifar10,contrast,1,0.5,10000\nm_deit_nano_cifar10,contrast,2,0.4,10000\nm_deit_nano_cifar10,contrast,3,0.3,10000\n"
        "begun_deit_nano_cifar10,jpeg,1,0.9,10000\n"
        "n_deit_nano_cifar10,contrast,1,0.3,10000\nn_deit_nano_cifar10,contrast,2,0.2,10000\nn_deit_nano_cifar10,contrast,3,0.1,10000\n"
        "n_deit_nano_cifar10,jpeg,1,0.6,10000\nn_deit_nano_cifar10,jpeg,2,0.5,10000\nn_deit_nano_cifar10,jpeg,3,0.4,10000\n"
    )
    text = make_tables.corruptions_table(path)
    assert "begun" not in text
    assert (
        "| model | jpeg | contrast | mean |" in text
        and "| `m` | 80.0 / 70.0 / 60.0 | 50.0 / 40.0 / 30.0 | 55.0 |" in text
    )
    assert "| `n` | 60.0 / 50.0 / 40.0 | 30.0 / 20.0 / 10.0 | 35.0 |" in text  # its rows come in another order
