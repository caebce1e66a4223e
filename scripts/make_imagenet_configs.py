"""Write configs/imagenet/: one recipe per published model, from the settings that its authors give for the family.

python scripts/make_imagenet_configs.py          # writes the files
python scripts/make_imagenet_configs.py --check  # names the files that differ and exits with 1
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "configs" / "imagenet"
PROCESSES = 8

# The sections of a recipe that all its sizes share; `train` adds the clipping of the size.
RECIPES = {
    "swin": {"schedule": "{warmup_epochs: 20, warmup_lr: 5.0e-7, min_lr: 5.0e-6}"},
    "pvt": {"schedule": "{warmup_epochs: 5, warmup_lr: 1.0e-6, min_lr: 1.0e-5, cooldown_epochs: 10}"},
    "deit": {
        "data": "crop_keep_aspect: true",
        "augment": "{repeats: 3}",
        "optimizer": "{lr_batch_scales: peak}",
        "schedule": "{warmup_epochs: 5, warmup_lr: 1.0e-6, min_lr: 1.0e-5, per: epoch}",
    },
    "soft": {
        "data": "crop_ratio: 0.9, crop_keep_aspect: true",
        "optimizer": "{lr: %s, lr_batch: 1024, lr_batch_scales: peak}",
        "schedule": "{warmup_epochs: 10, warmup_lr: 1.0e-6, min_lr: 5.0e-5, per: epoch}",
    },
}
RECIPES["mhla"] = {
    "augment": "{mixup: 0.2}",
    "train": "epochs: 200, ema: 0.9996",
    "optimizer": "{lr: 1.0e-3, lr_batch: 1024, lr_batch_scales: peak}",
    "schedule": "{warmup_epochs: 10, warmup_lr: 1.0e-6}",
}
RECIPES["t5"] = {
    "augment": "{repeats: 3}",
    "train": "epochs: 30, ema: 0.99996",
    "optimizer": '{lr: 2.0e-5, lr_batch: 512, lr_scale: {"*.attn.w?": 20.0, "*_conv2d.*": 20.0}}',
    "schedule": "{warmup_epochs: 5, min_lr: 2.0e-7}",
}
EMA = "ema: 0.99996"
PVT = {"tiny": (0.1, 128, ""), "small": (0.1, 128, ""), "medium": (0.3, 128, 1.0), "large": (0.3, 64, 1.0)}
HALF_PVT = {"tiny": (0.1, 128, ""), "small": (0.1, 64, ""), "medium": (0.3, 64, 1.0), "large": (0.3, 32, 1.0)}
SWIN = {"tiny": (0.2, 128, 5.0), "small": (0.3, 128, 5.0), "base": (0.5, 64, 5.0)}
DEIT_NOTE = "The authors' loop ends after 300 epochs, so the cooldown that their settings name never runs there."
SOFT_NOTE = (
    "Deviation: the authors draw the interpolation of every training image at random; here it is the same for all."
)
PVT_V2_NOTE = """\
Drop path and clipping are from the authors' configs, the rest are defaults of their training script, whose loop
ends after 300 epochs (the cooldown it names never runs); the evaluation crop was read in a copy of their repository.
Not known: whether the published runs changed any other option."""
INLINE_COMPARISON = {
    size: "Swin ({size}) under the recipe of the InLine comparison, which is Swin's own: {batches}."
    for size in ("tiny", "small")
} | {
    "base": """\
Swin ({size}) under the recipe of the InLine comparison: {batches}. Swin's own adds up two
such batches per step (train.accumulate: 2), 1024 in all."""
}
MHLA_NOTE = """\
Deviations: 256 pixels, where the authors pad images of 224 with zeros to 256; the paper itself says 300 epochs."""
T5_NOTE = """\
The authors start from a trained DeiT without class token: model.weights=FILE "model.allow=['*.attn.w?', '*_conv2d.*']".
Deviation: they also decay biases and norms."""
LAVIT = "LaViT ({{size}}): the paper states only 300 epochs and 224 pixels; the rest is the recipe of inline_pvt_{}."


def published(title: str, authors: str, extra: str = "", note: str = "") -> str:
    return f"{title} ({{size}}), recipe of {authors}{extra}: {{batches}}." + (f"\n{note}" if note else "")


# family: recipe, comment (for all sizes or one per size), sizes with (drop_path_rate, images per process, clip_grad)
FAMILIES = {
    "deit": (
        "deit",
        published("DeiT", "Touvron et al., ICML 2021", ", with repeated augmentation and EMA", DEIT_NOTE),
        {size: (0.1, 128, "") for size in ("tiny", "small", "base")},
    ),
    "pvt": (
        "pvt",
        "PVT ({size}) under the recipe of inline_pvt_{size}, for comparison; the PVT authors' own run may differ.",
        PVT,
    ),
    "pvt_v2": (
        "deit",
        "PVT v2 ({size}), recipe of Wang et al., CVMJ 2022: {batches}, with repeated augmentation.\n" + PVT_V2_NOTE,
        {f"b{i}": (0.1, 128, "") for i in range(3)} | {f"b{i}": (0.3, 128, 1.0) for i in range(3, 6)},
    ),
    "swin": ("swin", INLINE_COMPARISON, SWIN),
    "inline_deit": (
        "swin",
        published("InLine-DeiT", "Han et al., NeurIPS 2024"),
        {"tiny": (0.1, 512, 5.0), "small": (0.1, 128, 5.0), "base": (0.1, 64, 5.0)},
    ),
    "inline_pvt": ("pvt", published("InLine-PVT", "Han et al., NeurIPS 2024"), PVT),
    "inline_swin": ("swin", published("InLine-Swin", "Han et al., NeurIPS 2024"), SWIN),
    "pola_pvt": ("pvt", published("PolaFormer-PVT", "Meng et al., ICLR 2025"), HALF_PVT),
    "pola_swin": ("swin", published("PolaFormer-Swin", "Meng et al., ICLR 2025"), SWIN),
    "flatten_pvt": ("pvt", published("FLatten-PVT", "Han et al., ICCV 2023"), HALF_PVT),
    "flatten_swin": ("swin", published("FLatten-Swin", "Han et al., ICCV 2023"), SWIN),
    "agent_deit": (
        "swin",
        published("Agent-DeiT", "Han et al., ECCV 2024"),
        {"tiny": (0.0, 512, 5.0), "small": (0.1, 128, 5.0), "base": (0.3, 128, 5.0)},
    ),
    "agent_pvt": ("pvt", published("Agent-PVT", "Han et al., ECCV 2024"), PVT),
    "agent_swin": ("swin", published("Agent-Swin", "Han et al., ECCV 2024"), SWIN),
    **{
        family: (
            "soft",
            published(title, "Lu et al.", note=SOFT_NOTE),
            {size: (0.1, 128 if size in ("tiny", "small") else 32, 1.0) for size in rates},
        )
        for family, title, rates in (
            ("soft", "SOFT, NeurIPS 2021", ("tiny", "small", "medium", "large", "huge")),
            ("soft_norm", "SOFT with normalised kernel, IJCV 2024", ("tiny", "small", "medium", "large", "huge")),
        )
    },
    "vittt": (
        "swin",
        "ViT^3 ({size}): drop path from Han et al., CVPR 2026; the rest is the recipe of inline_deit_{size}.",
        {"tiny": (0.0, 512, 5.0), "small": (0.1, 128, 5.0), "base": (0.4, 64, 5.0)},
    ),
    "t5": (
        "t5",
        published("T^5", "Li et al., ICML 2026", note=T5_NOTE),
        {size: (0.0, 256, "") for size in ("tiny", "small")},
    ),
    "ca_deit": (
        "swin",
        "CA-DeiT ({size}): warm-up, clipping and drop path from Han et al., AAAI 2026; the rest is the recipe of "
        "inline_deit_{size}.",
        {"tiny": (0.0, 512, 5.0), "small": (0.1, 128, 5.0), "base": (0.4, 64, 5.0)},
    ),
    "mhla_deit": (
        "mhla",
        published("MHLA-DeiT", "the training script of Zhang et al., ICLR 2026", note=MHLA_NOTE),
        {size: (0.1, 128, "") for size in ("tiny", "small")},
    ),
    "lavit": (
        "pvt",
        {size: LAVIT.format(like) for size, like in (("tiny", "tiny"), ("small", "small"), ("base", "medium"))},
        {"tiny": PVT["tiny"], "small": PVT["small"], "base": PVT["medium"]},
    ),
}
SOFT_LR = {"tiny": "1.0e-3", "small": "1.0e-3", "medium": "3.5e-4", "large": "3.3e-4", "huge": "2.7e-4"}
SOFT_NORM_LR = SOFT_LR | {"medium": "4.0e-4"}


def text(family: str, size: str) -> str:
    """The config of one model."""
    recipe, comment, sizes = FAMILIES[family]
    sections, (drop_path, batch, clip) = RECIPES[recipe], sizes[size]
    comment = comment if isinstance(comment, str) else comment[size]
    name, shown = f"{family}_{size}", size.upper() if family == "pvt_v2" else size
    comment = comment.format(
        size=shown, batches=f"{batch} images per process, {PROCESSES * batch} in all on {PROCESSES}"
    )
    devices = ",".join(map(str, range(PROCESSES)))
    train = [f"clip_grad: {clip}"] if clip else []
    train += [EMA] if family == "deit" or recipe == "soft" else []
    train += [sections["train"]] if "train" in sections else []
    optimizer = sections.get("optimizer", "")
    if recipe == "soft":
        optimizer %= (SOFT_LR if family == "soft" else SOFT_NORM_LR)[size]
    lines = [
        *(f"# {line}" for line in comment.split("\n")),
        "# Not trained here: written from the published recipe; the test suite trains one step.",
        f"#   python -m paddle.distributed.launch --devices {devices} tools/train.py -c configs/imagenet/{name}.yaml",
        "base: ../base/imagenet.yaml",
        f"model: {{name: {name}, num_classes: 1000, drop_path_rate: {drop_path}}}",
        f"data: {{{', '.join([f'batch_size: {batch}', *filter(None, [sections.get('data')])])}}}",
        *([f"augment: {sections['augment']}"] if "augment" in sections else []),
        *([f"train: {{{', '.join(train)}}}"] if train else []),
        *([f"optimizer: {optimizer}"] if optimizer else []),
        f"schedule: {sections['schedule']}",
        f"output: runs/imagenet/{name}",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print the names of configs that differ, write nothing")
    arguments = parser.parse_args()
    wanted = {
        FOLDER / f"{family}_{size}.yaml": text(family, size) for family in FAMILIES for size in FAMILIES[family][2]
    }
    differ = [path for path, content in wanted.items() if not path.is_file() or path.read_text() != content]
    differ += [path for path in FOLDER.glob("*.yaml") if path not in wanted]
    if arguments.check:
        print(*(path.name for path in differ), sep="\n")
        return int(bool(differ))
    for path, content in wanted.items():
        path.write_text(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
