"""What a newcomer gets wrong: every mistake exits with 2 and one or two sentences that say how to mend it.

A line: a verb or a script ({names}: files that `made` prepares; -o: a training of {tiny}), and words of its message.
"""

import os
import pickle
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

import ppattn
from ppattn import weights
from ppattn.cli import VERBS, main
from ppattn.errors import verb_command
from tests.helpers.data_sets import Evil, cifar_archive, write_image

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

TINY = """
model: {name: deit_nano, attention: inline, img_size: 16, embed_dim: 32, depth: 2, num_heads: 2}
train: {epochs: 1, max_steps: 1}
"""

MISTAKES = """
train | Usage
train -c {here}/nowhere.yaml | No config file | nowhere.yaml
train -c configs/digits/inline_deit_nan.yaml | Did you mean 'configs/digits/inline_deit_nano.yaml'
train -c {here}/broken.yaml | broken.yaml | line 2, column 1
train -c {here}/twice.yaml | duplicate key 'epochs' in "{here}/twice.yaml", line 3, column 3
train -c {here}/chain.yaml | middle.yaml:1 | one level only
train -c {here}/no_base.yaml | no_base.yaml:1 | No config file 'nowhere.yaml'
train -c {here}/typo.yaml | typo.yaml:3 | Unknown setting 'optimizer.lrr' | Did you mean 'optimizer.lr'?
-o optimiser.lr=1e-3 | Unknown setting 'optimiser' | Did you mean 'optimizer'?
-o train.epoch=3 | -o train.epoch=3 | Did you mean 'train.epochs'?
-o epochs=3 | Unknown setting 'epochs' | Allowed: augment
-o data.batch_size=0 | data.batch_size = 0 | greater than or equal to 1
-o optimizer.name=lamb | optimizer.name = 'lamb' | 'adamw'
-o data.name=cifar | -o data.name=cifar: Unknown data set 'cifar' | 'cifar10'
-o 'augment.random_resized_crop.scale=[1.0, 0.08]' | random_resized_crop.scale | [smallest,
-o train=3 | train = 3
-o model.name=deit_tinny | Unknown model 'deit_tinny' | Did you mean 'deit_tiny'?
-o model.attention=inlin | -o model.attention=inlin: Unknown attention 'inlin' | Did you mean 'inline'?
-o model.attention_options.kernal=exp | 'kernal' | Did you mean 'kernel'?
-o 'model.embed_dims=[8]' | Unknown setting 'model.embed_dims'. Did you mean 'model.embed_dim'?
-o model.num_classes=0 | model.num_classes = 0: Input should be greater than or equal to 1
-o model.in_chans=4 | in_chans = 4 | 1 or 3
-o data.name=cifar10 -o data.download=false -o data.root={here}/nothing | CIFAR-10 | data.root
-o data.name=cifar10 -o data.root={here}/evil.tar.gz | evil.tar.gz | data_batch_1 | mkdir | damaged or not a CIFAR file
-o data.name=folder -o data.root={here}/nothing | nothing | not a folder
-o data.name=folder -o data.root={here}/flat | train/<class> | val/
-o data.name=folder -o data.root={here}/hollow | no images
-o data.name=folder -o data.root={here}/alien | classes missing from the training split | wolf
-o data.name=folder -o data.root={here}/small -o data.train=trian | data.train = 'trian'
-o data.batch_size=1438 | 1437 training images
-o train.best=map | train.best = map is not measured
-o data.fold=2/5 data.name=folder data.root={here}/small | data.fold = 2/5
-o data.train=foo | data.train = 'foo' | digits has fixed images
-o model.num_classes=7 | num_classes = 7, but the data has 10
-o augment.rand_augment=strong | rand_augment | strong
-o 'augment.color_jitter=[0,0,0,0.6]' | color_jitter | hue of at most 0.5
-o train.device=tpu | Device 'tpu' | cpu
-o train.device=cpu:1 | Device 'cpu:1' is not available
-o train.threads=0 | train.threads = 0 | greater than or equal to 1
-o train.seed=-1 | train.seed = -1 | greater than or equal to 0
-o train.amp=bf16 -o train.device=cpu | amp | needs a GPU
-o model.weights=nowhere | No weights at 'nowhere'
-o output={here}/text.png/run | text.png | Not a directory
train -c {tiny} --resume {here}/nothing | No weights at | nothing
train -c {tiny} --resume {run}/checkpoints/best | holds weights but no training state
train -c {tiny} --resume {run}/vdl | there is no {run}/vdl/latest.safetensors
train -c {run}/config.yaml --resume {run} -o output={out} train.seed=8 | Cannot resume: train.seed was 42
train -c {run}/config.yaml --resume {run} -o output={out} data.batch_size=30 | Cannot resume: data.batch_size was
train -c {run}/config.yaml --resume {run} -o output={out} model.embed_dim=16 | Cannot resume: model.embed_dim was 32
train -c {run}/config.yaml --resume {run} -o output={out} optimizer.lr=0.02 | Cannot resume: optimizer.lr was
train -c {run}/config.yaml --resume {run} -o output={out} train.epochs=4 | Cannot resume: train.epochs was 1
-o model.weights={here}/evil.pdparams | evil.pdparams | nothing in it was run
-o model.weights={run}/checkpoints/best -o model.embed_dim=48 | does not fit
eval | one of the arguments --run --weights --model is required
eval --weights a | needs the config of its model
eval -c {run}/config.yaml --weights {here}/other.safetensors | holds another run: name an --output
eval --run inline_deit_nano_cifar10 -c {tiny} | -c is for --weights
eval --run {here}/flat | flat | checkpoint
eval -c {tiny} | --weights
export --run {run} | --output
convert --to timm --from {run} --output {out} --num-classes 0 | --to takes --from and --output only
export --run {run} --output {out} --features --logits | not allowed with
export --run {run} --output {out} --format tensorrt | tensorrt | onnx
predict --model {here}/nothing {here}/digit.png | nothing
predict --model inlin_deit_nano_cifar10 {here}/digit.png | Did you mean 'inline_deit_nano_cifar10'?
eval --model {run}s | Did you mean | /run'?
report {run}s --output {here}/report.html | Did you mean | /run'?
report {run} {here}/flat --output {here}/report.html | {here}/flat
report {run} --output {run}/config.yaml | is what this call reads
predict --run {run} {here}/nothing.png | nothing.png
predict --run {run} {here}/text.png | text.png | image
predict --run {run} | IMAGE
predict --run {run} '' | holds no images
convert --model deit_tiny --from {here}/nothing.pth --output {out} | nothing.pth
convert --model deit_tiny --from {run} --output {out} | already a ppattn weights file
convert --model deit_tiny --from {here}/good.safetensors --num-classes -1 --output {out} | num_classes = -1
eval --run {run} --output {here}/text.png/eval | text.png | Not a directory
check -c {tiny} --json {here}/text.png/report.json | text.png | Not a directory
check --data {here}/nothing | nothing
predict --model {run} {here}/digit.png | not an exported model
predict --run {run} {here}/hollow | hollow | no images
predict --run {run} {here}/digit.png --topk 0 | topk
eval --run {run} --model {run} | --run | --model
eval --run {run} -o data.name=folder data.root={here}/small | classes are 10 (0, 1, 2, ...), the data has 1 (cat, ...)
eval -c {run}/config.yaml --weights {run}/checkpoints/best -o model.attention=softmax | was trained with attention
eval -c {run}/config.yaml --weights {run}/checkpoints/best -o model.num_heads=4 | was trained with num_heads
eval -c {run}/config.yaml --weights {run}/checkpoints/best -o model.attention_options.kernel=relu | was trained with
demo --output {out} | one of the arguments --run --model is required
demo --output {out} --run a --model b | --run DIR
demo --output {out} --model deit | deit
eval --run {run} --checkpoint bets | bets
eval --weights a --checkpoint latest | --checkpoint is for --run
export --weights a -c {tiny} --checkpoint latest --output {out} | no --checkpoint, which is for --run
export --run {run} --output {tiny} | tiny.yaml
export --run {run} --output {here} | no export | empty or new folder
benchmark --attentions inlin --output {out} | Did you mean 'inline'?
benchmark --modes trian --output {out} | trian | train
benchmark --attentions inline --batch 0 --output {out} | --batch 0
benchmark --models deit_nano --dtype float32 bfloat16 --output {out} | Only exported models run in bfloat16
benchmark --tokens 49 --models deit_tiny | without --models
benchmark --tokens 50 | '50' is not a grid of tokens | 48x64
benchmark --tokens 8x8 --attention-options landmarks=pool | --attention-options is for --attentions
benchmark --tokens 8x8 --dim 10 | --dim 10 | --heads 3
benchmark --models deit_tiny --output {out} --heads 6 | are for --tokens
benchmark --tokens 9 --output {here}/text.png | text.png is not a directory
analyze mask --run {run} --output {here}/text.png | text.png is not a directory
benchmark --attentions inline --output {out} --sizes | --sizes | at least one
analyze atention --run {run} | atention
analyze maps --run linformer_deit_nano_cifar10 --images {here}/digit.png --output {out} | lie on no grid
report {here}/nothing --output {out}/report.html | nothing
predict --model deit_tinny {here}/digit.png --csv {out}/scores.csv | deit_tiny
list modles | modles | models
list models 'pvt_nano*' | None of | `list backbones 'pvt_nano*'`
list models inlin_deit | 'inlin_deit' | Did you mean 'inline_deit
-o 'data.std=[58.4, 57.1, 57.4]' | data.std = 58.4 | less than or equal to 2
train -c {here}/own/config.yaml | own/config.yaml exists and was not written by a training
predict --run {run} {here}/digit.png --csv {run}/checkpoints/best.safetensors | would be overwritten
predict --run {run} {here}/digit.png --csv {run}/metrics.csv | would be overwritten
-o output=. | a name of its own
-o distill.blocks=1 | set distill.teacher
-o distill.temperature=3 | set distill.teacher
-o distill.teacher={out} output={out} | is the run folder itself
-o distill.teacher=nowhere | No weights at 'nowhere'
-o distill.teacher={run} distill.logits=0 | are all 0: the teacher would have no effect
-o distill.teacher={run} distill.features=1 train.best=f1 data.labels=false | train.best = f1 is not measured
-o distill.teacher={run} distill.blocks=0.5 data.labels=false | leaves a teacher's features to learn from
-o distill.teacher={run} data.mean=[0.5,0.5,0.5] | was trained with other pixel statistics: set data.mean=
-o distill.teacher={run} distill.blocks=1 model.depth=3 | has 2 blocks, the last of | the model 3 | distill.blocks to 0
-o distill.teacher={run} data.name=folder data.root={here}/small | other classes, 10 (0, 1, 2, ...), than the data, 1
-o augment.rand_augment=rand-n{digits} | 1000
train -c {here}/latin.yaml | latin.yaml | invalid continuation byte
train -c {here}/empty.yaml | empty.yaml is empty
-o data.name=list -o data.root={here}/lists -o data.train=beyond.txt | label 99999999999 | below 1,000,000
-o data.name=list -o data.root={here}/lists -o data.train=utf16.txt | utf16.txt | UTF-8
predict --run {run} {here}/broken_link.png | cannot read image
-o data.name=folder -o data.root={here}/control | not printable text | rename it
check --data {here}/both | class folders and shards | data.name
predict --run {run} {here}/pipe.png | pipe.png is not an image file
benchmark --attentions inline --seconds inf --output {out} | --seconds inf
scripts/studies/bench_input.py --cifar {here}/nothing | CIFAR-10
scripts/studies/bench_peers.py --torch {here}/nothing | --torch | nothing
scripts/make_shards.py --data {here}/small --output {here}/text.png/shards | text.png | Not a directory
scripts/make_shards.py --data {here}/small -o data.val=test --output {out} | data.val = 'test' is not in
scripts/run_grid.py --grid {here}/nothing.csv | nothing.csv | No such file
scripts/run_grid.py softmax_deit_nano -o data.rot=x --results {out} --runs {out} | data.rot | data.root
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with everything that can be wrong."""
    here = tmp_path_factory.mktemp("wrong")
    files = {
        "tiny.yaml": f"{TINY}output: {here}/fresh\n", "run.yaml": f"{TINY}output: {here}/run\n",
        "broken.yaml": "train: {epochs: 3\n", "twice.yaml": "train:\n  epochs: 1\n  epochs: 2\n",
        "empty.yaml": "# nothing\n", "chain.yaml": "base: middle.yaml\n", "middle.yaml": "base: tiny.yaml\n",
        "no_base.yaml": "base: nowhere.yaml\n", "typo.yaml": "train: {epochs: 3}\noptimizer:\n  lrr: 0.1\n",
        "own/config.yaml": f"# notes\n{TINY}output: {here}/own\n", "text.png": "not an image",
        "lists/beyond.txt": "a.png 99999999999\nb.png 0\n", "lists/val.txt": "a.png 0\n", "both/train.tar": "",
    }  # fmt: skip
    for folder in ("flat", "own", "lists", "hollow/train/cat", "hollow/val/cat", "both"):
        (here / folder).mkdir(parents=True)
    for name, text in files.items():
        (here / name).write_text(text)
    (here / "lists/utf16.txt").write_text("a.png 0\n", encoding="utf-16")
    (here / "latin.yaml").write_bytes(b"output: caf\xe9\n")
    red = "a\x1b[31m"
    for name in ("digit", "small/train/cat/0", "small/val/cat/0", "alien/train/cat/0", "alien/val/wolf/0",
                 f"control/train/{red}/0", f"control/val/{red}/0", "both/train/cat/0"):  # fmt: skip
        write_image(here / f"{name}.png", 0)
    cifar_archive(here / "evil.tar.gz", {"data_batch_1": pickle.dumps(Evil())})
    (here / "evil.pdparams").write_bytes(pickle.dumps({"weight": Evil()}))
    weights.save(here / "good.safetensors", {"weight": np.arange(999.0)}, {})
    os.mkfifo(here / "pipe.png")
    (here / "broken_link.png").symlink_to("nowhere")
    return here


@pytest.fixture(scope="module")
def run(made):
    """A run folder of a single step."""
    assert main("train", ["-c", str(made / "run.yaml")]) == 0
    (made / "other.safetensors").hardlink_to(made / "run/checkpoints/best.safetensors")
    return made / "run"


@pytest.mark.parametrize("mistake", MISTAKES.strip().splitlines(), ids=lambda mistake: mistake.split(" | ")[0])
def test_mistake_exits_2_with_a_sentence(mistake, made, request, capsys, tmp_path, monkeypatch):
    run = request.getfixturevalue("run") if "{run}" in mistake else None
    names = {"here": made, "tiny": made / "tiny.yaml", "out": tmp_path / "out", "run": run, "digits": "9" * 400}
    command, *words = mistake.format(**names).split(" | ")
    verb, *argv = shlex.split(f"train -c {made}/tiny.yaml {command}" if command.startswith("-o") else command)
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [verb, *argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        code = runpy.run_path(str(ROOT / verb), run_name="__main__") if verb.endswith(".py") else main(verb, argv)
    except SystemExit as stop:  # of a script
        code = stop.code
    message = capsys.readouterr().err
    assert code == 2, message
    for word in words:
        assert word.lower() in message.lower(), message
    said = message[message.index("error: ") :]
    assert "Traceback" not in message and "\n" not in said.strip()
    assert len(re.findall(r"(?<!\.)[.?!](?=\s)", said)) <= 3, f"more than a few sentences: {said}"
    assert not (made / "fresh/checkpoints").exists(), "nothing was trained"
    assert not (tmp_path / "executed").exists(), "code from a file was run"
    assert not (tmp_path / "out").exists(), "nothing is left of what was refused"


def test_a_tool_that_imports_paddle_says_the_sentence_alone(made):
    call = [sys.executable, "tools/analyze.py", "maps", "--run", made / "nothing"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("cmd", ["list.py", "train.py -c {tiny} -o train.epochs=200 train.max_steps=null output={out}"])
def test_a_reader_that_leaves_ends_a_verb_quietly(cmd, made, tmp_path):
    """As `| head -1` does. A short list may be in the pipe completely before the reader leaves: exit code 0."""
    call = [sys.executable, *f"tools/{cmd}".format(tiny=made / "tiny.yaml", out=tmp_path / "run").split()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(call, cwd=ROOT, **pipes) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() in ((0, 1) if cmd == "list.py" else (1,))


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_a_full_disk_behind_stdout():
    command = f"{shlex.quote(sys.executable)} tools/list.py models >/dev/full"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "error: The disk is full; make room and run again.\n")


def test_names_are_shown_as_escapes_where_the_terminal_cannot(made, tmp_path):
    command = [sys.executable, "tools/check.py", "--data", str(tmp_path / "naïve\x1b[31m 猫.png")]
    environment = os.environ | {"PYTHONIOENCODING": "ascii:strict", "LC_ALL": "C"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
    assert done.returncode == 2 and b"na\\xefve\\x1b[31m \\u732b.png" in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [(OSError(12, "Cannot allocate memory"), 2, "not enough memory"), (MemoryError(), 2, "not enough memory"),
     (OSError(28, "No space left on device", "here"), 2, "here: The disk is full"),
     (PermissionError(13, "Permission denied", "there"), 2, "there: Permission denied"),
     (OSError(5, "Input/output error"), 2, "A disk: Input/output error"),
     (ZeroDivisionError("our fault"), 1, "ZeroDivisionError: our fault\nThis is a defect of ppattn")],
)  # fmt: skip
def test_memory_disk_and_our_own_defects_are_distinguished(made, capsys, error, code, words):
    with patch("ppattn.data.check.check_splits", side_effect=error):
        assert main("check", ["-c", str(made / "tiny.yaml")]) == code
    assert words in capsys.readouterr().err


def test_version_verbs_and_what_each_does(capsys):
    assert main(["--version"]) == main(["list", "--version"]) == 0
    assert capsys.readouterr().out == f"ppattn {ppattn.__version__}\n" * 2
    assert main(["list", "attentions", "inline"]) == 0 and main([]) == 2
    assert main(None, ["trian"]) == 2 and "Did you mean 'train'?" in capsys.readouterr().err and main(["--help"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if line.startswith("  "))
    assert list(lines) == VERBS and "Look through a data set" in lines["check"]


def test_messages_name_the_command_that_was_started(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/ppattn", "train"])
    assert verb_command("convert") == "ppattn convert"
    monkeypatch.setattr(sys, "argv", ["tools/train.py"])
    assert verb_command("convert") == "python tools/convert.py"
