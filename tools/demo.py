"""Write a page that classifies pictures in the browser.

python tools/demo.py --model long_inline_deit_nano_cifar10 --output demo
python -m http.server --directory demo
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn.cli import main

if __name__ == "__main__":
    sys.exit(main("demo", doc=__doc__))
