"""Find the first step, micro-batch and layer of a training that is not finite, by a replay from its last checkpoint.

python tools/debug.py --run runs/try
python tools/debug.py --run runs/try --steps 100
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn.cli import main

if __name__ == "__main__":
    sys.exit(main("debug", doc=__doc__))
