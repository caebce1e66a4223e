"""`slow_steps.py STEP -c ...`: training whose steps from STEP on take long, so that a signal finds it at work."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppattn.cli import main
from ppattn.engine import metrics, trainer


def install(first: int) -> None:
    honest = trainer.update
    metrics.add_pictures = metrics.draw_curves = metrics.cost.macs = lambda *_: 0

    def update(run) -> None:
        honest(run)
        if run.state.progress.step >= first:
            time.sleep(0.3)

    trainer.update = update


if __name__ == "__main__":
    install(int(sys.argv[1]))
    sys.exit(main("train", sys.argv[2:]))
