"""Write the tables and pictures of README, docs, examples and results/ that come from result files.

python -m scripts.tables            # write them
python -m scripts.tables --check    # compare instead, exit with 1 where one differs

A table stands between `<!-- table NAME -->` and `<!-- end -->`; `tables` below lists the names.
"""

import argparse
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from scripts.run_grid import CONFIGS, ROOT
from scripts.tables import cifar10, gpu, pictures, speed, weights
from scripts.tables.markdown import in_language_of
from scripts.tables.runs import Row, read_rows

BLOCK = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
PAGES = ("README*.md", "docs/**/*.md", "examples/**/*.md", "results/**/*.md")


def tables(root: Path, rows: list[Row]) -> dict[str, Callable[[], str]]:
    """What makes each table, by its name."""
    return {
        "attentions": partial(cifar10.attentions, rows, root),
        "cifar10": partial(cifar10.adamw_table, rows),
        "recipe": partial(cifar10.muon_table, rows),
        "comparison": partial(cifar10.comparison_table, rows),
        "plain_deit": partial(cifar10.plain_deit_table, rows),
        "tokens_axis": partial(cifar10.tokens_axis_table, rows),
        "tokens_time": partial(cifar10.tokens_time_table, root),
        "tenth": partial(cifar10.tenth_table, rows),
        "fronts": partial(cifar10.fronts_table, rows),
        "local_terms": partial(cifar10.local_table, rows),
        "local_gains": partial(cifar10.local_gains_table, rows),
        "cifar10_ablations": partial(cifar10.ablation_table, rows),
        "runs": partial(cifar10.runs_table, rows, root),
        "corruptions": partial(cifar10.corruptions_table, root / "results/cifar10/corruptions.csv"),
        "released": weights.released_table,
        "finetune": partial(weights.finetune_table, root),
        "clients": partial(weights.clients_table, root),
        "linearized": partial(weights.linearized_table, root),
        "linearized_blocks": partial(weights.blocks_table, root),
        "linearized_seconds": partial(weights.seconds_table, root),
        "lra": partial(speed.lra_table, root),
        "lengths_infer": partial(speed.lengths_table, root, "infer"),
        "lengths_train": partial(speed.lengths_table, root, "train"),
        "tokens": partial(speed.tokens_table, root),
        "pyramids": partial(speed.pyramids_table, root),
        "speed_amd": partial(speed.peers_table, root, "amd"),
        "engines_batch_8": partial(speed.engines_table, root, "intel", "export"),
        "engines_batch_1": partial(speed.engines_table, root, "intel", "single"),
        "nano_speed": partial(speed.nano_table, root),
        "gpu_forms": partial(gpu.forms_table, root),
        "gpu_half": partial(gpu.half_table, root),
        "gpu_programs": partial(gpu.programs_table, root),
    }


def main(arguments: list[str] | None = None, root: Path = ROOT, grid: Path = CONFIGS / "grid.csv") -> int:
    parser = argparse.ArgumentParser("python -m scripts.tables", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if anything differs")
    check = parser.parse_args(arguments).check
    rows = read_rows(root, grid)
    made, wrong = tables(root, rows), []
    for path in sorted(page for pattern in PAGES for page in root.glob(pattern)):
        old = path.read_text(encoding="utf-8")
        place = path.relative_to(root)
        new = BLOCK.sub(lambda block, place=place: block[1] + in_language_of(place, made[block[2]]()) + block[3], old)
        if new != old:
            wrong.append(path)
            if not check:
                path.write_text(new, encoding="utf-8")
    wrong += pictures.outdated(root, rows, write=not check)
    for path in wrong:
        print(path.relative_to(root), "differs: python -m scripts.tables writes it" if check else "written")
    return int(bool(wrong) and check)


if __name__ == "__main__":
    sys.exit(main())
