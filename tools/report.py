"""Compare runs in one HTML file.

python tools/report.py runs/digits/inline_deit_nano runs/digits/softmax --output report.html
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn.cli import main

if __name__ == "__main__":
    sys.exit(main("report", doc=__doc__))
