"""The sequence backbone and the tasks of Long Range Arena."""

import io
import json
import os
import random
import re
import subprocess
import sys
import tarfile
import tracemalloc
from collections import Counter
from math import erf
from pathlib import Path

import numpy as np
import paddle
import pytest

import ppattn
from examples.lra.data import LARGEST_REVIEW, LISTOPS, OPERATORS, Limits, Tokens, expression
from ppattn import cost
from ppattn.attention import ATTENTIONS
from ppattn.cli import main
from ppattn.config import load_config, make_config
from ppattn.data import build_datasets
from ppattn.engine.loss import ModelWithLoss
from ppattn.engine.trainer import train
from ppattn.errors import UserError
from tests.helpers.data_sets import cifar_archive, cifar_files
from tests.helpers.runs import state

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted(path for path in (ROOT / "examples/lra/configs").glob("*.yaml") if path.stem != "base")
NAMES = [name for name in ATTENTIONS.list() if name != "less"]


def small(attention="softmax", **changes):
    shape = {"vocab_size": 9, "max_len": 23, "num_classes": 3, "embed_dim": 16, "depth": 2, "num_heads": 2}
    model = ppattn.create_model("sequence", attention=attention, **shape | changes)
    paddle.seed(3)
    for name, p in model.named_parameters():  # away from zeros, and large enough to be seen behind the norms
        scale = 0.05 if name.endswith("mixing") else 0.3  # MHLA's normaliser must stay positive
        p.set_value(p + scale * paddle.rand(p.shape) if name.endswith("mixing") else p + scale * paddle.randn(p.shape))
    return model


def padded(sequences, width, rng, scattered=False):
    """ids and mask [B, width]; what the mask hides is a token like any other."""
    ids = rng.integers(0, 9, (len(sequences), width))
    mask = np.zeros(ids.shape, bool)
    for i, tokens in enumerate(sequences):
        places = np.sort(rng.permutation(width)[: len(tokens)]) if scattered else np.arange(len(tokens))
        ids[i, places], mask[i, places] = tokens, True
    return paddle.to_tensor(ids), paddle.to_tensor(mask)


def logits_and_gradients(model, calls):
    """Logits [B, K] of several calls, and the gradient of their weighted sum with respect to every parameter."""
    model.clear_gradients()
    logits = paddle.concat([model(*call) for call in calls])
    weights = np.random.default_rng(5).standard_normal(logits.shape)
    (logits * paddle.to_tensor(weights, logits.dtype)).sum().backward()
    return [logits.numpy(), *(np.zeros(p.shape) if p.grad is None else p.grad.numpy() for p in model.parameters())]


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_does_not_depend_on_its_padding(name, float64):
    model = small(name)
    model.eval()
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 9, n) for n in (7, 23, 12, 7, 1)]
    alone = logits_and_gradients(model, [(paddle.to_tensor(tokens[None]),) for tokens in sequences])
    assert len({tuple(row) for row in alone[0].round(3)}) == 5, "the sequences differ"
    for width, scattered in ((23, False), (40, False), (31, True)):
        got = logits_and_gradients(model, [padded(sequences, width, rng, scattered)])
        for ours, wanted in zip(got, alone, strict=True):
            assert np.abs(ours - wanted).max() <= 1e-9 * max(1.0, np.abs(wanted).max())


def test_less_is_refused_in_a_sentence():
    with pytest.raises(UserError, match="score maps of one size"):
        small("less")


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def norm(x, weight, bias):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight + bias


def with_mask(p, ids, mask):
    """The softmax model with masked keys and a masked mean over the whole padded batch, in numpy."""
    gelu = np.vectorize(lambda v: 0.5 * v * (1 + erf(v / 2**0.5)))
    x = p["embed.weight"][ids] + p["pos_embed"][:, : ids.shape[1]]
    for i in range(2):
        b = {name.removeprefix(f"blocks.{i}."): value for name, value in p.items()}
        qkv = norm(x, b["norm1.weight"], b["norm1.bias"]) @ b["attn.qkv.weight"] + b["attn.qkv.bias"]
        q, k, v = (t.reshape(*ids.shape, 2, 8).transpose(0, 2, 1, 3) for t in np.split(qkv, 3, -1))
        scores = np.where(mask[:, None, None], q @ k.swapaxes(-1, -2) / 8**0.5, -np.inf)
        y = (softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        x = x + y @ b["attn.proj.weight"] + b["attn.proj.bias"]
        hidden = gelu(norm(x, b["norm2.weight"], b["norm2.bias"]) @ b["mlp.fc1.weight"] + b["mlp.fc1.bias"])
        x = x + hidden @ b["mlp.fc2.weight"] + b["mlp.fc2.bias"]
    x = norm(x, p["norm.weight"], p["norm.bias"]) * mask[..., None]
    pooled = x.sum(1) / mask.sum(1, keepdims=True)
    return np.maximum(pooled @ p["head.0.weight"] + p["head.0.bias"], 0) @ p["head.2.weight"] + p["head.2.bias"]


def test_the_model_equals_one_with_masked_keys_and_a_masked_mean():
    model, rng = small(), np.random.default_rng(1)
    model.eval()
    ids, mask = padded([rng.integers(0, 9, n) for n in (5, 23, 11, 5)], 23, rng)
    arrays = {name: p.numpy().astype("float64") for name, p in model.named_parameters()}
    wanted = with_mask(arrays, ids.numpy(), mask.numpy())
    assert np.abs(model(ids, mask).numpy() - wanted).max() <= 1e-4 * np.abs(wanted).max()
    marked = paddle.to_tensor(np.where(mask.numpy(), ids.numpy(), -1))
    assert np.array_equal(model(marked).numpy(), model(ids, mask).numpy()), "an id below 0 is padding"


def test_values_are_embedded_as_numbers_and_pairs_meet_in_the_head():
    rng = np.random.default_rng(2)
    model = small(embedding="value")
    ids = rng.integers(0, 9, (2, 6))
    wanted = ids[..., None] / 8 * model.embed.weight.numpy() + model.embed.bias.numpy()
    assert np.allclose(model.embed(paddle.to_tensor(ids[..., None] / 8, "float32")).numpy(), wanted, atol=1e-6)
    pair, single = small(pairs=True, num_classes=0), small(num_classes=0)
    for model in (pair, single):
        model.eval()
    single.set_state_dict(pair.state_dict())
    first, second = ([rng.integers(0, 9, n) for n in lengths] for lengths in ((4, 9, 4), (6, 2, 4)))
    a, b = (single(*padded(rows, 12, rng)).numpy() for rows in (first, second))
    both = [padded(rows, 12, rng) for rows in (first, second)]
    ids, mask = (paddle.stack(list(parts), axis=1) for parts in zip(*both, strict=True))
    assert np.allclose(pair(ids, mask).numpy(), np.concatenate([a, b, a * b, a - b], 1), atol=1e-5)
    assert pair.feat_channels == [64]


@pytest.mark.parametrize(
    ("ids", "mask", "words"),
    [(np.zeros([2, 24]), None, "1 to max_len = 23 tokens"), (np.full([2, 5], 9), None, "Tokens are 0 to 8"),
     (np.full([2, 5], -1), None, "1 to max_len"), (np.zeros([2, 5]), np.ones([2, 4]), "another shape"),
     (np.zeros([2, 2, 5]), None, "takes ids")],
)  # fmt: skip
def test_wrong_ids_are_refused_in_a_sentence(ids, mask, words):
    with pytest.raises(UserError, match=words):
        small()(paddle.to_tensor(ids, "int64"), None if mask is None else paddle.to_tensor(mask, "bool"))


def test_a_sequence_model_is_not_exported_and_has_no_maps(tmp_path):
    with pytest.raises(UserError, match="Sequence takes sequences, not images. It computes a batch length by length"):
        ppattn.export(small(), tmp_path / "out")
    with pytest.raises(UserError, match="feature maps"):
        small().forward_features(paddle.zeros([1, 4], "int64"))


# ---- ListOps ---------------------------------------------------------------------------------------------------------


def value(words):
    """Of an expression as words, by rewriting its innermost bracket again and again; and its depth and arguments."""
    words, depth, arguments = list(words), 0, []
    while "]" in words:
        end = words.index("]")
        start = max(i for i in range(end) if words[i].startswith("["))
        numbers = sorted(int(word) for word in words[start + 1 : end])
        n = len(numbers)
        result = {
            "[MIN": numbers[0],
            "[MAX": numbers[-1],
            "[MED": (numbers[(n - 1) // 2] + numbers[n // 2]) // 2,
            "[SM": sum(numbers) % 10,
        }[words[start]]
        depth = max(depth, sum(word.startswith("[") for word in words[:start]) + 1)
        arguments.append(n)
        words[start : end + 1] = [str(result)]
    assert len(words) == 1
    return int(words[0]), depth, arguments


def made(**settings):
    return build_datasets(make_config({"data": {"name": "listops", "options": settings}}))


@pytest.fixture(scope="module")
def published():
    """2,000 expressions of the published length, depth and arguments."""
    return made(train=1500, val=500)


def test_listops_follows_the_published_rules(published):
    seen = set()
    for split in (published.train, published.val):
        for i in range(0, len(split), 10):
            words = [LISTOPS[token] for token in split.image(i)]
            result, depth, arguments = value(words)
            assert result == split.label(i)
            assert depth <= 9 and min(arguments) >= 2 and max(arguments) <= 10  # at depth 10 there are digits only
            assert 500 < len(words) < 2000 and words[0].startswith("[") and words[-1] == "]"
        seen |= {split.image(i).tobytes() for i in range(len(split))}
    assert len(seen) == 2000, "no two alike"


def test_listops_has_the_published_statistics(published):
    labels = np.concatenate([published.train.labels, published.val.labels])
    shares = np.bincount(labels, minlength=10) / len(labels)
    error = 4 * np.sqrt(0.17 * 0.83 / len(labels))  # four standard deviations
    assert abs(shares[0] - 0.171) < error and abs(shares[9] - 0.166) < error
    assert 0.075 - error < shares[1:9].min() and shares[1:9].max() < 0.09 + error
    assert 920 < np.median(published.train.lengths) < 1020
    first = np.array([published.train.image(i)[0] for i in range(len(published.train))])
    rule = sum(np.bincount(published.train.labels[first == token]).max() for token in range(10, 14)) / len(first)
    assert 0.34 < rule < 0.40, "README.md: the first operator alone gives 37 %"
    rng, count, lengths, limits = random.Random(1), Counter(), [], Limits(10**6, max_depth=10, max_args=10)
    for _ in range(8000):
        tokens = bytearray()
        expression(rng, limits, tokens)
        words = [LISTOPS[token] for token in tokens]
        count.update(word for word in words if word in OPERATORS)
        lengths.append(len(words))
    assert abs(np.mean([500 < n < 2000 for n in lengths]) - 0.083) < 4 * np.sqrt(0.083 * 0.917 / 8000)
    assert abs(np.mean([n == 1 for n in lengths]) - 0.75) < 4 * np.sqrt(0.75 * 0.25 / 8000)
    total = sum(count.values())
    assert all(abs(count[name] / total - 0.25) < 0.02 for name in OPERATORS)


def test_listops_is_a_function_of_its_seed():
    sets = [made(train=30, val=20, min_length=10, max_length=60, max_depth=4, seed=seed) for seed in (1, 1, 2)]
    rows = [[splits.train.image(i).tolist() for i in range(30)] for splits in sets]
    assert rows[0] == rows[1] != rows[2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"max_length": 100}, "leaves no length above min_length = 500"),
     ({"min_length": 0, "max_depth": 1, "train": 20, "val": 5}, "only 10 fit"),
     ({"max_lenght": 100}, "Unknown listops option 'max_lenght'. Did you mean 'max_length'?"),
     ({"max_args": 1}, "listops: max_args = 1: Input should be greater than or equal to 2"),
     ({"train": 1.5}, "listops: train = 1.5: Input should be a valid integer")],
)  # fmt: skip
def test_options_that_cannot_be_are_an_error(settings, words):
    with pytest.raises(UserError, match=re.escape(words)):
        made(**settings)


# ---- the other tasks, from small files -------------------------------------------------------------------------------


def test_lra_image_is_cifar_in_grey(tmp_path):
    files, images, labels = cifar_files()
    cifar_archive(tmp_path / "cifar-10-python.tar.gz", files)
    splits = build_datasets(make_config({"data": {"name": "lra_image", "root": str(tmp_path)}}))
    assert [len(splits.train), len(splits.val), splits.train.input_kind] == [20, 4, "sequences"]
    assert [*splits.train.labels, *splits.val.labels] == labels
    r, g, b = images[3].reshape(-1, 3).astype("float64").T
    exact = (0.2989 * r + 0.587 * g + 0.114 * b) / 255 * 255.5
    row = splits.train.image(3)
    assert row.shape == (1024,) and np.abs(row - (exact - 0.5)).max() <= 0.501


def reviews(folder, archive, more=()):
    texts = {
        f"{part}/{kind}/{i}_1.txt": f"{part} {kind} {i}é".encode()
        for part in ("train", "test")
        for kind in ("neg", "pos")
        for i in (1, 0)
    }
    texts = {"train/unsup/0_0.txt": b"", "train/urls_pos.txt": b"", **texts, **dict(more)}  # those two are not used
    if archive:
        with tarfile.open(folder / "aclImdb_v1.tar.gz", "w:gz") as tar:
            for name, text in texts.items():
                info = tarfile.TarInfo(f"aclImdb/{name}")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text))
    else:
        for name, text in texts.items():
            (folder / "aclImdb" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "aclImdb" / name).write_bytes(text)


@pytest.mark.parametrize("archive", [True, False])
def test_lra_text_is_the_bytes_of_the_reviews(tmp_path, archive):
    reviews(tmp_path, archive)
    splits = build_datasets(make_config({"data": {"name": "lra_text", "root": str(tmp_path)}}))
    assert splits.classes == ["neg", "pos"] and splits.train.labels.tolist() == [0, 0, 1, 1]
    assert bytes(splits.val.image(2).astype(np.uint8)).decode() == "test pos 0é"
    assert bytes(splits.val.image(3).astype(np.uint8)).decode() == "test pos 1é"


def test_lra_text_does_not_depend_on_the_order_of_the_disk(tmp_path, monkeypatch):
    reviews(tmp_path, archive=False)
    config, glob = make_config({"data": {"name": "lra_text", "root": str(tmp_path)}}), Path.glob
    seen = []
    for key in (lambda path: path.name, lambda path: [-ord(sign) for sign in str(path)]):
        monkeypatch.setattr(Path, "glob", lambda self, pattern, key=key: iter(sorted(glob(self, pattern), key=key)))
        train = build_datasets(config).train
        seen.append([(train.image(i).tolist(), train.label(i)) for i in range(len(train))])
    assert seen[0] == seen[1] and len(seen[0]) == 4


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize(
    ("text", "words"), [(b"", "has 0 bytes"), (b"x" * (LARGEST_REVIEW + 1), "has 1,048,577 bytes")]
)
def test_an_empty_or_huge_review_is_named_before_training(tmp_path, archive, text, words):
    reviews(tmp_path, archive, [("test/pos/7_1.txt", text)])
    with pytest.raises(UserError, match=rf"aclImdb.*: test/pos/7_1.txt {words}; a review has 1 to 1,048,576"):
        build_datasets(make_config({"data": {"name": "lra_text", "root": str(tmp_path)}}))


def test_a_small_archive_with_a_review_of_a_gigabyte_takes_little_memory(tmp_path):
    file, info = tmp_path / "aclImdb_v1.tar.gz", tarfile.TarInfo("sparse")
    real = {"name": "aclImdb/train/pos/0_1.txt", "realsize": str(1 << 30), "major": "1", "minor": "0"}
    info.pax_headers, info.size = {f"GNU.sparse.{key}": value for key, value in real.items()}, 512
    with tarfile.open(file, "w:gz", format=tarfile.PAX_FORMAT) as tar:  # its map says: a gigabyte, all of it a hole
        tar.addfile(info, io.BytesIO(b"0\n".ljust(512, b"\0")))
    assert file.stat().st_size < 1000
    tracemalloc.start()
    with pytest.raises(UserError, match="train/pos/0_1.txt has 1,073,741,824 bytes"):
        build_datasets(make_config({"data": {"name": "lra_text", "root": str(tmp_path)}}))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6


def test_lra_retrieval_is_pairs_of_papers(tmp_path):
    (tmp_path / "new_aan_pairs.train.tsv").write_bytes(b'1.0\ta\tb\tabc\tdefgh\n0.0\ta\tc\t"x\tyz\n')
    (tmp_path / "new_aan_pairs.test.tsv").write_bytes(b"0\ta\tb\tab\tb\n")
    config = make_config({"data": {"name": "lra_retrieval", "root": str(tmp_path)}})
    splits = build_datasets(config)
    assert splits.train.labels.tolist() == [1, 0]
    assert splits.train.image(0).tolist() == [[97, 98, 99, -1, -1], [100, 101, 102, 103, 104]]
    tokens = Tokens(3, pairs=True)
    batch = tokens.assemble(np.stack([tokens.pixels(splits.train.image(i)) for i in range(2)]))
    assert batch.tolist() == [[[97, 98, 99], [100, 101, 102]], [[34, 120, -1], [121, 122, -1]]]
    (tmp_path / "new_aan_pairs.test.tsv").write_bytes(b"0\ta\tb\tab\tb\n2\ta\tb\tab\tb\n")
    with pytest.raises(UserError, match=r"test.tsv:2 is not"):
        build_datasets(config)
    (tmp_path / "new_aan_pairs.test.tsv").write_bytes(b"0\ta\tb\tab\t\n")
    with pytest.raises(UserError, match=r"test.tsv:1 is not .* no text empty"):
        build_datasets(config)


@pytest.mark.parametrize("name", ["lra_text", "lra_retrieval"])
def test_missing_files_are_named(tmp_path, name):
    with pytest.raises(UserError, match=r"aclImdb_v1|new_aan_pairs"):
        build_datasets(make_config({"data": {"name": name, "root": str(tmp_path)}}))


# ---- training --------------------------------------------------------------------------------------------------------


def tiny(folder, **changes):
    tree = {
        "model": {"name": "sequence", "attention": "inline", "vocab_size": 15, "max_len": 60, "drop_rate": 0.1},
        "data": {
            "name": "listops",
            "batch_size": 20,
            "options": {"train": 100, "val": 41, "min_length": 10, "max_length": 60, "max_depth": 4},
        },
        "train": {"epochs": 2, "threads": 1, "seed": 5},
        "output": str(folder),
    }
    for section, values in changes.items():
        tree[section] = values if "name" in values else tree.get(section, {}) | values
    return make_config(tree)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_its_accuracy_stands_beside_the_majority_class(tmp_path, capsys):
    summary = train(tiny(tmp_path / "one", data={"num_workers": 1}))
    labels = made(train=100, val=41, min_length=10, max_length=60, max_depth=4).val.labels
    assert summary["majority"] == np.bincount(labels).max() / 41 and summary["steps"] == 10
    assert f"(majority class {100 * summary['majority']:.2f} %)" in (tmp_path / "one" / "log.txt").read_text()
    train(tiny(tmp_path / "two", train={"max_steps": 3}))
    train(tiny(tmp_path / "two"), resume="auto")
    one, two = state(tmp_path / "one"), state(tmp_path / "two")
    assert one.keys() == two.keys() and all(one[key].tobytes() == two[key].tobytes() for key in one)
    capsys.readouterr()
    assert main(["eval", "--run", str(tmp_path / "one")]) == 0
    assert "majority class" in capsys.readouterr().out
    metrics = json.loads((tmp_path / "one" / "eval" / "metrics.json").read_text())
    assert metrics["top1"] == summary["best_top1"] and metrics["majority"] == summary["majority"]
    run, out = ["--run", str(tmp_path / "one")], ["--output", str(tmp_path / "out")]
    (tmp_path / "a.png").write_bytes(b"")
    for line in (
        ["eval", *run, "--mirror"],
        ["export", *run, *out],
        ["analyze", "entropy", *run, *out],
        ["predict", *run, str(tmp_path / "a.png")],
        ["demo", *run, *out],
        ["linearize", "--model", run[1], "--to", "linear", *out],
    ):
        assert main(line) == 2
        assert "Sequence takes sequences, not images. It computes" in capsys.readouterr().err, line
    with pytest.raises(UserError, match="Sequence takes sequences, not images"):
        train(tiny(tmp_path / "three", distill={"teacher": run[1]}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"model": {"name": "deit_nano", "attention": "softmax"}}, "takes images, but listops holds sequences"),
     ({"data": {"name": "digits"}}, "takes sequences, but digits holds images"),
     ({"augment": {"horizontal_flip": 0.5}}, "settings of `augment` are for images")],
)  # fmt: skip
def test_images_and_sequences_are_not_mixed_up(tmp_path, changes, words):
    config = tiny(tmp_path, **changes)
    with pytest.raises(UserError, match=words):
        train(config)


@pytest.mark.slow
def test_benchmark_measures_sequences(tmp_path):
    arguments = "--models sequence --attentions linear --sizes 32 64 --batch 2 --modes train --rounds 1 --seconds 0.01"
    assert main(["benchmark", *arguments.split(), "--threads", "1", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
    found = [(row["mode"], row["img_size"], row["tokens"]) for row in rows]
    assert found == [("train", "1x32", 32), ("train", "1x64", 64)]
    assert rows[1]["macs"] > 1.9 * rows[0]["macs"] and (tmp_path / "train.png").exists()


def test_macs_are_those_of_the_products():
    def products(n, c=16, hidden=32, depth=2):
        return depth * (4 * n * c * c + 2 * n * n * c + 2 * n * c * hidden) + c * 2 * c + 2 * c * 3

    assert cost.macs(small()) == products(23)
    assert cost.macs(small(), (1, 12)) == products(12)
    assert cost.macs(small(pairs=True)) == 2 * (products(23) - 32 * 19) + 64 * 32 + 32 * 3


# ---- the configs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_loads_and_says_what_it_is(path):
    config, _ = load_config(path)
    assert config.imports == ["examples.lra"] and config.output == f"runs/lra/{path.stem}"
    text = path.read_text()
    assert re.match(r"# .*\S", text) and f"tools/train.py -c examples/lra/configs/{path.name}" in text
    assert path.name in (ROOT / "examples/lra/README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_builds_and_steps(path):
    config, _ = load_config(path)
    model = ppattn.create_model("sequence", **config.model.arguments())
    ids = np.random.default_rng(0).integers(0, config.model.vocab_size, [2, 2, 30] if config.model.pairs else [2, 30])
    loss = ModelWithLoss(model)(paddle.to_tensor(ids), paddle.eye(model.num_classes)[1:3])
    loss.backward()
    assert 0 < loss.item() < 3 * np.log(model.num_classes)
    assert all(p.grad is not None and np.isfinite(p.grad.numpy()).all() for p in model.parameters())


@pytest.mark.slow
def test_the_commands_need_no_more_than_the_name_of_the_module(tmp_path):
    """In processes that know nothing of the example before."""

    def run(verb, *rest):
        line = [sys.executable, "-W", "ignore", f"tools/{verb}.py", *rest]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    few = "data.options={train: 64, val: 20, min_length: 10, max_length: 60, max_depth: 4}"
    config = "examples/lra/configs/listops_short.yaml"
    run("train", "-c", config, "-o", few, "model.max_len=60", "schedule.warmup_epochs=0", f"output={tmp_path}/run")
    assert "on 20 sequences" in run("eval", "--run", f"{tmp_path}/run")
    best = f"{tmp_path}/run/checkpoints/best.safetensors"
    assert "on 20 sequences" in run("eval", "--run", best, "--imports", "examples.lra")
    assert "sequence" in run("list", "backbones", "--imports", "examples.lra")
    assert "examples/lra" not in run("list", "configs")
