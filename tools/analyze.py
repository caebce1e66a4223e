"""Pictures and numbers about the attention of a trained model.

python tools/analyze.py maps --run runs/digits/inline_deit_nano
python tools/analyze.py locality --run runs/digits/inline_deit_nano --images 32
python tools/analyze.py injectivity --run runs/digits/inline_deit_nano
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn.cli import main

if __name__ == "__main__":
    sys.exit(main("analyze", doc=__doc__))
