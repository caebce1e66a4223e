"""What a newcomer gets wrong: every mistake exits with 2 and one or two sentences that say how to mend it.

A line of the table: a command, in which {names} are files that `made` prepares, and words of its message. One that
begins with -o is a training of {tiny}.
"""

import os
import pickle
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

import ppattn
from ppattn import weights
from ppattn.cli import VERBS, main
from ppattn.errors import UserError, command
from tests.helpers.data_sets import cifar_archive, write_image

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
train -c {here}/sequence.yaml | sequence.yaml | list | mapping
train -c {here}/empty_section.yaml | empty_section.yaml:2 | train
train -c {here}/twice.yaml | duplicate key 'epochs' in "{here}/twice.yaml", line 3, column 3
train -c {here}/two_bases.yaml | two_bases.yaml:1 | No config file
train -c {here}/chain.yaml | middle.yaml:1 | one level only
train -c {here}/no_base.yaml | no_base.yaml:1 | No config file 'nowhere.yaml'
train -c {here}/typo.yaml | typo.yaml:3 | Unknown setting 'optimizer.lrr' | Did you mean 'optimizer.lr'?
-o optimiser.lr=1e-3 | Unknown setting 'optimiser' | Did you mean 'optimizer'?
-o train.epoch=3 | -o train.epoch=3 | Did you mean 'train.epochs'?
-o epochs=3 | Unknown setting 'epochs' | Allowed: augment
-o train.epochs | 'train.epochs' | section.key=value
-o 'model.depths=[1, 2' | -o model.depths=[1, 2 | flow sequence
-o train.epochs=many | train.epochs = 'many' | valid integer
-o train.epochs=2.5 | train.epochs = 2.5 | valid integer
-o data.batch_size=0 | data.batch_size = 0 | greater than or equal to 1
-o optimizer.lr=-1 | optimizer.lr = -1 | greater than 0
-o loss.label_smoothing=1.0 | loss.label_smoothing = 1.0 | less than 1
-o optimizer.name=lamb | optimizer.name = 'lamb' | 'adamw'
-o data.name=cifar | -o data.name=cifar: Unknown data set 'cifar' | 'cifar10'
-o 'optimizer.betas=[0.9]' | optimizer.betas | at least 2 items
-o 'optimizer.betas=[0.9, 1.0]' | optimizer.betas = 1.0 | less than 1
-o 'augment.random_resized_crop.scale=[1.0, 0.08]' | random_resized_crop.scale | [smallest,
-o 'augment.random_resized_crop.scale=[-1, 1]' | random_resized_crop.scale | greater than 0
-o 'augment.random_resized_crop.ratio=[0, 1]' | random_resized_crop.ratio | greater than 0
train -c {here}/crop.yaml | crop.yaml:1 | augment.random_resized_crop.ratio | [smallest, largest]
-o model.mlp_ratio=0 | model.mlp_ratio = 0 | greater than 0
train -c cifar10/pvt_nano -o 'model.mlp_ratios=[4, -4]' | model.mlp_ratios = -4 | greater than 0
-o model.drop_path_rate=1.0 | model.drop_path_rate = 1.0 | less than 1
-o train=3 | train = 3
-o train.ema=true | train.ema = True | number
-o train.seed=99999999999999999999999 | train.seed | less than 9223372036854775808
-o model.name=deit_tinny | Unknown model 'deit_tinny' | Did you mean 'deit_tiny'?
-o model.attention=inlin | -o model.attention=inlin: Unknown attention 'inlin' | Did you mean 'inline'?
-o model.attention_options.kernal=exp | 'kernal' | Did you mean 'kernel'?
-o model.attention_options.kernel=cosine | 'cosine' | identity
-o model.attention_options.residual=maybe | residual = 'maybe' | valid boolean
-o model.attention=polaformer model.attention_options.alpha=abc | alpha = 'abc' | valid number
-o model.attention=polaformer model.attention_options.alpha=-1 | alpha = -1 | greater than or equal to 0
-o model.attention=polaformer model.attention_options.kernel_size=-1 | = -1 | equal to 1
-o model.attention=polaformer model.attention_options.kernel_size=5.0 | 5.0 | valid integer
-o model.attention=focused model.attention_options.kernel_size=4 | kernel_size = 4 | odd
-o model.attention=focused model.attention_options.focusing_factor=abc | focusing | valid number
-o model.attention=focused model.attention_options.focusing_factor=-3 | = -3 | greater than 0
-o model.attention=less model.attention_options.dp_weight=abc | dp_weight = 'abc' | valid number
-o model.attention=agent model.attention_options.agent_num=many | 'many' | valid integer; or: Input should be a valid l
-o 'model.attention=[inline, softmax, inline]' | attention lists 3
-o model.num_heads=5 | num_heads | 5 | 32
-o 'model.embed_dims=[8]' | Unknown setting 'model.embed_dims'. Did you mean 'model.embed_dim'?
-o model.clas_token=null | Unknown setting 'model.clas_token'
-o model.depth=2.5 | -o model.depth=2.5: model.depth = 2.5: Input should be a valid integer.
-o 'model.img_size=[1, 2, 3]' | at most 2 items
-o model.num_classes=0 | model.num_classes = 0: Input should be greater than or equal to 1
-o model.window_size=7 | Unknown setting 'model.window_size'
-o model.in_chans=4 | in_chans = 4 | 1 or 3
train -c cifar10/pvt_nano -o data.name=digits 'model.num_heads=[1, 2]' | num_heads has 2 | depths has 4
-o data.name=cifar10 -o data.download=false -o data.root={here}/nothing | CIFAR-10 | data.root
-o data.name=cifar10 -o data.root={here}/text.png | text.png | could not be opened
-o data.name=cifar10 -o data.root={here}/cut.tar.gz | cut.tar.gz | EOFError
-o data.name=cifar10 -o data.root={here}/other.tar.gz | other.tar.gz | data_batch_1 | not found
-o data.name=cifar10 -o data.root={here}/evil.tar.gz | evil.tar.gz | data_batch_1 | system | damaged or not a CIFAR file
-o data.name=folder -o data.root={here}/nothing | nothing | not a folder
-o data.name=folder -o data.root={here}/flat | train/<class> | val/
-o data.name=folder -o data.root={here}/noclass | names of parts
-o data.name=folder -o data.root={here}/hollow | no images
-o data.name=folder -o data.root={here}/alien | classes missing from the training split | wolf
-o data.name=folder -o data.root={here}/small -o data.train=trian | data.train = 'trian'
-o data.name=folder -o data.root={here}/small -o data.val=vall | data.val = 'vall'
-o data.batch_size=1438 | 1437 training images
-o data.name=folder -o data.root={here}/small | data.batch_size lower
-o data.train=foo | data.train = 'foo' | digits | null
-o data.name=cifar10 -o data.val=foo | data.val = 'foo' | cifar10 | null
-o 'data.mean=[0.5]' | data.mean | at least 3 items
-o data.name=imagenet -o data.root={here}/trainonly | train/<class> | val/ is not there
-o model.num_classes=7 | num_classes = 7, but the data has 10
-o augment.rand_augment=strong | rand_augment | strong
-o augment.rand_augment=rand-m99 | rand-m99 | m <= mmax
-o augment.rand_augment=rand-m9-p2 | rand-m9-p2 | p <= 1
-o 'augment.color_jitter=[0.1]' | color_jitter | at least 3
-o 'augment.color_jitter=[0,0,0,0.6]' | color_jitter | hue of at most 0.5
-o train.device=tpu | Device 'tpu' | cpu
-o train.amp=bf16 -o train.device=cpu | amp | needs a GPU
-o model.weights=nowhere | No weights at 'nowhere'
eval --run nowhere | No weights at 'nowhere'
-o output={here}/text.png/run | text.png | Not a directory
train -c {tiny} --resume {here}/nothing | nothing
train -c {tiny} --resume {here}/cut.safetensors | cut.safetensors | not a complete safetensors file
train -c {tiny} --resume {run}/checkpoints/best | no training state | checkpoints/latest
train -c {tiny} --resume {run} -o optimizer.lr=0.5 | optimizer.lr | 0.5
-o model.weights={here}/nothing | No weights | nothing
-o model.weights={here}/cut.safetensors | cut.safetensors | not a complete safetensors file
-o model.weights={here}/flipped.safetensors | flipped.safetensors
-o model.weights={here}/evil.pdparams | evil.pdparams | nothing in it was run
-o model.weights={here}/text.pdparams | text.pdparams
-o model.weights={run}/checkpoints/best -o model.embed_dim=48 | does not fit
eval | one of the arguments --run --weights --model is required
eval --run {here}/nothing | nothing
eval --weights a | needs the config of its model
eval --run inline_deit_nano_cifar10 -c {tiny} | -c is for --weights
eval --run {here}/flat | flat | checkpoint
eval -c {tiny} | --weights
export --run {here}/nothing --output {out} | nothing
export --run {run} | --output
export --run {run} --output {out} --format tensorrt | tensorrt | onnx
predict --model {here}/nothing {here}/digit.png | nothing
predict --model inlin_deit_nano_cifar10 {here}/digit.png | Did you mean 'inline_deit_nano_cifar10'?
predict --run inline_deit_nano_cifa10 {here}/digit.png | Did you mean 'inline_deit_nano_cifar10'?
eval --model {run}s | Did you mean | /run'?
analyze maps --run {run}s | Did you mean | /run'?
report {run}s --output {here}/report.html | Did you mean | /run'?
export --run {run} --precision int8 --output {here}/int8 | --format onnx
predict --model {here}/flat {here}/digit.png | flat
predict --run {run} {here}/nothing.png | nothing.png
predict --run {run} {here}/text.png | text.png | image
predict --run {run} | IMAGE
predict --run {run} '' | holds no images
convert --model deit_tinny --from {here}/text.pdparams --output {out} | Did you mean 'deit_tiny'?
convert --model deit_tiny --from {here}/nothing.pth --output {out} | nothing.pth
convert --model deit_tiny --from {run} --output {out} | already a ppattn weights file
convert --model deit_tiny --from {here}/good.safetensors --num-classes -1 --output {out} | num_classes = -1
eval --run {run} --output {here}/text.png/eval | text.png | Not a directory
analyze maps --run {run} --output {here}/text.png/maps | text.png | Not a directory
check -c {tiny} --json {here}/text.png/report.json | text.png | File exists
check --data {here}/nothing | nothing
predict --model {run} {here}/digit.png | not an exported model
predict --run {run} {here}/hollow | hollow | no images
predict --run {run} {here}/digit.png --topk 0 | topk
eval --model {run} | run
eval --run {run} --model {run} | --run | --model
eval --run {run} -o data.name=cifra10 | -o data.name=cifra10: Unknown data set
eval --run {run} -o data.name=folder -o data.root={here}/nothing | nothing | not a folder
eval --run {run} --checkpoint bets | bets
export --run {run} --output {tiny} | tiny.yaml
export --run {run} --output {tiny}/model | tiny.yaml
export --run {run} --output {here} | no export | empty or new folder
export -c {tiny} --weights {here}/text.pdparams --output {out} | text.pdparams
benchmark --models deit_tinny --output {out} | Did you mean 'deit_tiny'?
benchmark --attentions inlin --output {out} | Did you mean 'inline'?
benchmark --modes trian --output {out} | trian | train
benchmark --attentions inline --batch 0 --output {out} | --batch 0
benchmark --attentions inline --rounds 0 --output {out} | --rounds 0
benchmark --attentions inline --threads 0 --output {out} | --threads 0
benchmark --attentions inline --seconds 0 --output {out} | --seconds 0
benchmark --attentions inline --sizes 32 0 --output {out} | --sizes 0
benchmark --tokens 50 | '50' is not a grid of tokens | 48x64
benchmark --tokens 8x8 --dim 10 | --dim 10 | --heads 3
benchmark --attentions inline --output {out} --sizes | --sizes | at least one
benchmark --attentions inline --output {out} --modes | --modes | at least one
analyze maps --run {here}/nothing | nothing
analyze atention --run {run} | atention
list modles | modles | models
list models 'pvt_nano*' | None of | `list backbones 'pvt_nano*'`
list models inlin_deit | 'inlin_deit' | Did you mean 'inline_deit
-o optimizer.lr=1e400 | optimizer.lr = inf | finite number
-o 'optimizer.betas=[0.9, .nan]' | optimizer.betas = nan | finite number
-o 'model.attention_options=!!python/name:os.system x' | could not determine a constructor | python/name
-o train.epochs=1:30 | train.epochs = '1:30' | valid integer
-o 'data.mean=[1e29, 0, 0]' | data.mean = 1e+29 | less than or equal to 2
-o 'data.std=[58.4, 57.1, 57.4]' | data.std = 58.4 | less than or equal to 2
-o train.accumulate=100000 | train.accumulate = 100000, but an epoch has
-o 'augment.random_resized_crop={{scale: [8, 100]}}' | less than or equal to 1
-o model.norm_eps=1 | model.norm_eps | 0.001
-o model.name=on | Unknown model 'on'
train -c {here}/own/config.yaml | own/config.yaml exists and was not written by a training
predict --run {run} {here}/digit.png --csv {run}/checkpoints/best.safetensors | would be overwritten
check --data {here}/small --json {here}/small/train/cat/0.png | would be overwritten
-o output=. | a name of its own
-o augment.rand_augment=rand-n{digits} | 1000
train -c {here}/latin.yaml | latin.yaml | invalid continuation byte
-o data.name=list -o data.root={here}/lists -o data.train=negative.txt | '-1' | labels are 0, 1, 2, ... or names
-o data.name=list -o data.root={here}/lists -o data.train=fraction.txt | '0.5' | labels are 0, 1, 2, ... or names
-o data.name=list -o data.root={here}/lists -o data.train=beyond.txt | label 99999999999 | below 1,000,000
-o data.name=list -o data.root={here}/lists -o data.train=mixed.txt | 'cat' | labels are 0, 1, 2, ... or names
-o data.name=list -o data.root={here}/lists -o data.train=utf16.txt | utf16.txt | UTF-8
-o data.name=cifar10 -o data.root={here}/cifar_negative | labels 0 to 2
-o data.name=cifar10 -o data.root={here}/cifar_fraction | labels 0 to 2
-o data.name=cifar10 -o data.root={here}/cifar_itself | not from CIFAR-10
-o data.name=cifar10 -o data.root={here}/cifar_text | does not hold numbers
-o data.name=cifar10 -o data.root={here}/cifar_names | label_names
-o data.name=cifar10 -o data.root={here}/cifar_empty | not from CIFAR-10
predict --run {run} {here}/broken_link.png | cannot read image
-o data.name=folder -o data.root={here}/control | not printable text | rename it
check --data {here}/both | class folders and shards | data.name
check -c {tiny} --json {tiny} | would be overwritten
predict --run {run} {here}/pipe.png | pipe.png is not an image file
predict --run {run} {here}/digit.png --csv {here}/digit.png | would be overwritten
eval --run {here}/edited_classes.safetensors | classes = 'cat'
eval --run {here}/edited_config.safetensors | config = [1]
train -c {tiny} --resume {here}/edited_progress.safetensors | another version of ppattn
benchmark --attentions inline --seconds inf --output {out} | --seconds inf
"""

PYTHON = [
    ("deit_nano", {"attention": 5}, "attention = 5"),
    ("deit_nano", {"attention": [None] * 3}, "attention = [None, None, None]"),
    ("deit_nano", {"attention_options": 5}, "attention_options = 5"),
    ("deit_nano", {"patch_size": 0}, "patch_size = 0"), ("deit_nano", {"in_chans": "3"}, "in_chans = '3'"),
    ("deit_nano", {"num_classes": -1}, "num_classes = -1"), ("deit_nano", {"num_heads": [4]}, "num_heads = [4]"),
    ("deit_nano", {"qkv_bias": 1}, "qkv_bias = 1"), ("deit_nano", {"mlp_ratio": float("nan")}, "mlp_ratio = nan"),
    ("pvt_nano", {"depths": [0, 0, 0, 0]}, "depths = 0"),
    ("pvt_nano", {"num_heads": 4}, "num_heads = 4: Input should be an instance of Sequence"),
    ("swin_nano", {"window_size": 0}, "window_size = 0"),
]  # fmt: skip

SCRIPTS = [
    ("studies/bench_input.py --photos {here}/nothing", "nothing", "JPEG"),
    ("studies/bench_input.py --cifar {here}/nothing", "CIFAR-10"),
    ("studies/bench_peers.py --torch {here}/nothing", "--torch", "nothing"),
    ("make_shards.py --data {here}/small --output {here}/text.png/shards", "text.png", "Not a directory"),
    ("make_shards.py --data {here}/small --output {out} --per-shard 0", "--per-shard 0"),
    ("make_shards.py --data {here}/small -o data.val=test --output {out}", "use -c"),
    ("run_grid.py --grid {here}/nothing.csv", "nothing.csv", "No such file"),
    ("run_grid.py softmax_deit_nano -o data.rot=x --results {out} --runs {out}", "data.rot", "data.root"),
]


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil-was-here",)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with everything that can be wrong."""
    here = tmp_path_factory.mktemp("wrong")
    files = {
        "tiny.yaml": f"{TINY}output: {here}/fresh\n",
        "run.yaml": f"{TINY}output: {here}/run\n",
        "broken.yaml": "train: {epochs: 3\n",
        "sequence.yaml": "- train\n- epochs\n",
        "empty_section.yaml": "model: {name: deit_tiny}\ntrain:\noutput: runs/x\n",
        "twice.yaml": "train:\n  epochs: 1\n  epochs: 2\n",
        "two_bases.yaml": "base: [tiny.yaml, run.yaml]\n",
        "chain.yaml": "base: middle.yaml\n",
        "middle.yaml": "base: tiny.yaml\n",
        "no_base.yaml": "base: nowhere.yaml\n",
        "typo.yaml": "train: {epochs: 3}\noptimizer:\n  lrr: 0.1\n",
        "crop.yaml": "augment: {random_resized_crop: {ratio: [2.0, 0.5]}}\n",
        "text.png": "not an image",
        "text.pdparams": "not weights",
    }
    for name, text in files.items():
        (here / name).write_text(text)
    write_image(here / "digit.png", 0)
    (here / "flat").mkdir()
    for folder in ("noclass/train", "noclass/val", "hollow/train/cat", "hollow/val/cat"):
        (here / folder).mkdir(parents=True)
    for name in (
        "small/train/cat/0",
        "small/val/cat/0",
        "alien/train/cat/0",
        "alien/val/wolf/0",
        "trainonly/train/cat/0",
    ):
        write_image(here / f"{name}.png", 0)
    cifar_archive(here / "other.tar.gz", {"batches.meta": pickle.dumps({b"label_names": [b"cat"]})})
    cifar_archive(here / "evil.tar.gz", {"data_batch_1": pickle.dumps(Evil())})
    cifar_archive(here / "whole.tar.gz", {"data_batch_1": os.urandom(4000)})
    (here / "cut.tar.gz").write_bytes((here / "whole.tar.gz").read_bytes()[:2000])
    (here / "evil.pdparams").write_bytes(pickle.dumps({"weight": Evil()}))
    weights.save(here / "good.safetensors", {"weight": np.arange(999.0)}, {})
    good = (here / "good.safetensors").read_bytes()
    (here / "cut.safetensors").write_bytes(good[:-100])
    (here / "flipped.safetensors").write_bytes(good[:-100] + bytes([good[-100] ^ 1]) + good[-99:])
    make_odd_content(here)
    return here


def make_odd_content(here: Path) -> None:
    """Files that nobody writes on purpose: other types, other encodings, pipes, and edited ones with a right seal."""
    (here / "latin.yaml").write_bytes(b"output: caf\xe9\n")
    lists = here / "lists"
    lists.mkdir()
    texts = {"negative": "a.png -1", "fraction": "a.png 0.5", "beyond": "a.png 99999999999", "mixed": "a.png cat"}
    for name, text in texts.items():
        (lists / f"{name}.txt").write_text(f"{text}\nb.png 0\n")
    (lists / "utf16.txt").write_text("a.png 0\n", encoding="utf-16")
    (lists / "val.txt").write_text("a.png 0\n")
    (here / "own").mkdir()
    (here / "own/config.yaml").write_text(f"# notes\n{TINY}output: {here}/own\n")
    os.mkfifo(here / "pipe.png")
    itself: list = []
    itself.append(itself)
    changes = {
        "negative": {b"labels": [-1]},
        "fraction": {b"labels": [0.5]},
        "itself": {b"data": itself},
        "text": {b"data": np.array([["a"] * 3072])},
        "names": {b"label_names": 5},
        "good": {},
    }
    for name, change in changes.items():
        folder = here / f"cifar_{name}"
        folder.mkdir()
        batch = {b"data": np.zeros((1, 3072), np.uint8), b"labels": [0]}
        meta = {b"label_names": [b"ant", b"bee", b"cat"]}
        for member in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
            (folder / member).write_bytes(pickle.dumps(batch | change, 2))
        (folder / "batches.meta").write_bytes(pickle.dumps(meta | change, 2))
    shutil.copytree(here / "cifar_good", here / "cifar_empty")
    nothing = {b"data": np.zeros((0, 3072), np.uint8), b"labels": []}
    (here / "cifar_empty/test_batch").write_bytes(pickle.dumps(nothing, 2))
    (here / "broken_link.png").symlink_to("nowhere")
    write_image(here / "control/train/a\x1b[31m/0.png", 0)
    write_image(here / "control/val/a\x1b[31m/0.png", 0)
    write_image(here / "both/train/cat/0.png", 0)
    (here / "both/train.tar").write_bytes(b"")
    known = {"config": {}, "classes": ["cat"], "preprocess": {"mean": [0.0] * 3, "std": [1.0] * 3}}
    weights.save(here / "edited_classes.safetensors", {"a": np.zeros(1)}, known | {"classes": "cat"})
    weights.save(here / "edited_config.safetensors", {"a": np.zeros(1)}, known | {"config": [1]})
    state = {"kind": "state", "world": 1, "runtime": {}, "progress": {"epoch": "x"}, "ema_updates": 0, "scaler": {}}
    weights.save(here / "edited_progress.safetensors", {"a": np.zeros(1)}, known | state)


@pytest.fixture(scope="module")
def run(made):
    """A run folder of a single step."""
    assert main("train", ["-c", str(made / "run.yaml")]) == 0
    return made / "run"


@pytest.mark.parametrize("mistake", MISTAKES.strip().splitlines(), ids=lambda mistake: mistake.split(" | ")[0])
def test_mistake_exits_2_with_a_sentence(mistake, made, request, capsys, tmp_path, monkeypatch):
    run = request.getfixturevalue("run") if "{run}" in mistake else None
    names = {"here": made, "tiny": made / "tiny.yaml", "out": tmp_path / "out", "run": run, "digits": "9" * 400}
    command, *words = mistake.format(**names).split(" | ")
    verb, *argv = shlex.split(f"train -c {made}/tiny.yaml {command}" if command.startswith("-o") else command)
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    try:
        code = main(verb, argv)
    except SystemExit as stop:  # argparse
        code = stop.code
    message = capsys.readouterr().err
    assert code == 2, message
    for word in words:
        assert word.lower() in message.lower(), message
    said = message[message.index("error: ") :]
    assert "Traceback" not in message and "\n" not in said.strip()
    assert len(re.findall(r"(?<!\.)[.?!](?=\s)", said)) <= 3, f"more than a few sentences: {said}"
    assert not (made / "fresh/checkpoints").exists(), "nothing was trained"
    assert not (tmp_path / "evil-was-here").exists(), "code from a file was run"


@pytest.mark.parametrize(("name", "arguments", "words"), PYTHON, ids=lambda value: str(value))
def test_wrong_arguments_in_python(name, arguments, words):
    with pytest.raises(UserError, match=re.escape(words)):
        ppattn.create_model(name, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"threads": value} for value in (0, -1, 1.5, True, float("inf"))]
    + [{"seed": value} for value in (-1, 10**30, float("nan"))]
    + [{"device": 5}],
    ids=str,
)
def test_wrong_settings_of_a_process(arguments):
    ((name, value),) = arguments.items()
    with pytest.raises(UserError, match=re.escape(f"{name} = {value}")):
        ppattn.setup(**{"device": "cpu"} | arguments)


def python(*argv, **settings) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, *argv], cwd=ROOT, stderr=subprocess.PIPE, text=True, **settings)


@pytest.mark.parametrize("mistake", SCRIPTS, ids=lambda mistake: mistake[0])
def test_mistake_with_a_script_exits_2_with_a_sentence(mistake, made, tmp_path, monkeypatch, capsys):
    command, *words = mistake
    script, *argv = shlex.split(command.format(here=made, out=tmp_path / "out"))
    monkeypatch.setattr(sys, "argv", [script, *argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")
    message = capsys.readouterr().err
    assert stop.value.code == 2 and message.startswith("error: ") and message.count("\n") == 1, message
    assert all(word in message for word in words)


@pytest.mark.parametrize("command", ["analyze maps --run {here}/nothing", "benchmark --attentions no --output {out}"])
def test_a_tool_that_imports_paddle_says_the_sentence_alone(command, made, tmp_path):
    verb, *argv = shlex.split(command.format(here=made, out=tmp_path / "out"))
    process = python(f"tools/{verb}.py", *argv)
    message = process.communicate()[1]
    assert process.returncode == 2 and message.startswith("error: ") and message.count("\n") == 1, message


@pytest.mark.parametrize("command", ["list.py", "train.py -c {tiny} -o train.epochs=200 train.max_steps=null"])
def test_a_reader_that_leaves_ends_a_verb_quietly(command, made, tmp_path):
    """As `| head -1` does. A short list may be in the pipe completely before the reader leaves: exit code 0."""
    argv = shlex.split(command.format(tiny=made / "tiny.yaml"))
    output = ["-o", f"output={tmp_path}/run"] if "train" in command else []
    with python(f"tools/{argv[0]}", *argv[1:], *output, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() in ((0, 1) if command == "list.py" else (1,))


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_a_full_disk_behind_stdout():
    command = f"{shlex.quote(sys.executable)} tools/list.py models >/dev/full"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "error: The disk is full; make room and run again.\n")


def test_names_are_shown_as_escapes_where_the_terminal_cannot(made, tmp_path):
    name = tmp_path / "naïve\x1b[31m 猫.png"
    command = [sys.executable, "tools/check.py", "--data", str(name)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii:strict", "LC_ALL": "C"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
    assert done.returncode == 2 and b"na\\xefve\\x1b[31m \\u732b.png" in done.stderr


def test_our_own_defect_is_a_traceback(made, capsys, monkeypatch):
    monkeypatch.setattr("ppattn.data.check.check_splits", lambda *_: 1 / 0)
    assert main("check", ["-c", str(made / "tiny.yaml")]) == 1
    message = capsys.readouterr().err
    assert "ZeroDivisionError" in message and "defect of ppattn" in message


@pytest.mark.parametrize(
    ("error", "words"),
    [(OSError(12, "Cannot allocate memory"), "not enough memory"),
     (OSError(28, "No space left on device", "here"), "here: The disk is full"),
     (PermissionError(13, "Permission denied", "there"), "there: Permission denied"),
     (OSError(5, "Input/output error"), "A disk: Input/output error"), (MemoryError(), "not enough memory")],
)  # fmt: skip
def test_memory_and_disk_are_told_apart(made, capsys, monkeypatch, error, words):
    def fail(*_):
        raise error

    monkeypatch.setattr("ppattn.data.check.check_splits", fail)
    assert main("check", ["-c", str(made / "tiny.yaml")]) == 2
    assert words in capsys.readouterr().err


def test_version_and_verbs_in_this_process(capsys):
    assert main(["--version"]) == main(["list", "--version"]) == 0
    assert capsys.readouterr().out == f"ppattn {ppattn.__version__}\n" * 2
    assert main(["list", "attentions", "inline"]) == 0 and main([]) == 2


def test_help_says_what_each_verb_does(capsys):
    assert main(["--help"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if line.startswith("  "))
    assert list(lines) == VERBS and "Look through a data set" in lines["check"]


def test_messages_name_the_command_that_was_started(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/ppattn", "train"])
    assert command("convert") == "ppattn convert"
    monkeypatch.setattr(sys, "argv", ["tools/train.py"])
    assert command("convert") == "python tools/convert.py"


def test_unknown_verb(capsys):
    assert main(None, ["trian"]) == 2
    assert "train" in capsys.readouterr().err


def test_gpu_on_a_machine_without_one(made, capsys):
    if paddle.is_compiled_with_cuda():
        pytest.skip("this Paddle has GPU support")
    assert main("train", ["-c", str(made / "tiny.yaml"), "-o", "train.device=gpu"]) == 2
    assert "'gpu' is not available; this Paddle offers: auto, cpu" in capsys.readouterr().err
