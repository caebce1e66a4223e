"""Write the tables and pictures of README, docs, examples and results/ that come from result files.

python -m scripts.tables            # write them
python -m scripts.tables --check    # compare instead, exit with 1 where one differs

A table stands between `<!-- table NAME ARGUMENTS -->` and `<!-- end -->`; the function NAME_table makes it.
"""

import argparse
import re
import sys
from functools import partial
from pathlib import Path

from scripts.run_grid import CONFIGS, ROOT
from scripts.tables import cifar10, gpu, pictures, speed, weights
from scripts.tables.markdown import in_language_of
from scripts.tables.runs import Results

TABLES = vars(cifar10) | vars(gpu) | vars(speed) | vars(weights)
BLOCK = re.compile(r"(<!-- table (\w+)((?: \w+)*) -->\n).*?(<!-- end -->)", re.DOTALL)
PAGES = ("README*.md", "docs/**/*.md", "examples/**/*.md", "results/**/*.md")


def renewed(results: Results, page: Path, block: re.Match) -> str:
    begin, name, words, end = block.groups()
    return begin + in_language_of(page, TABLES[f"{name}_table"](results, *words.split())) + end


def main(arguments: list[str] | None = None, root: Path = ROOT, grid: Path = CONFIGS / "grid.csv") -> int:
    parser = argparse.ArgumentParser("python -m scripts.tables", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if anything differs")
    check, results, wrong = parser.parse_args(arguments).check, Results(root, grid), []
    for path in sorted(page for pattern in PAGES for page in root.glob(pattern)):
        old = path.read_text(encoding="utf-8")
        new = BLOCK.sub(partial(renewed, results, path.relative_to(root)), old)
        if new != old:
            wrong.append(path)
            if not check:
                path.write_text(new, encoding="utf-8")
    wrong += pictures.outdated(results, write=not check)
    for path in wrong:
        print(path.relative_to(root), "differs: python -m scripts.tables writes it" if check else "written")
    return int(bool(wrong) and check)


if __name__ == "__main__":
    sys.exit(main())
