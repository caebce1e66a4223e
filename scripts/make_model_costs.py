"""Write ppattn/zoo/costs.csv: parameters and traced MACs of every model and backbone at its own size.

python scripts/make_model_costs.py            # all entries, a few minutes
python scripts/make_model_costs.py deit_tiny  # the named ones; the other rows stay
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ppattn
from ppattn import cost, zoo
from ppattn.files.atomic import write_rows
from ppattn.zoo import table


def main(names: list[str]) -> None:
    ppattn.setup(device="cpu")
    rows = dict(zoo.costs()) if names else {}
    for name in names or zoo.model_entries():
        model = ppattn.create_model(name)
        rows[name] = {"params": cost.params(model), "macs": cost.macs(model)}
        print(name, *rows[name].values(), flush=True)
    known = [[name, *rows[name].values()] for name in zoo.model_entries() if name in rows]
    write_rows(table.COSTS, [["name", "params", "macs"], *known], "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="default: all entries")
    main(parser.parse_args().names)
