"""`slow_steps.py STEP -c ...`: training whose steps from STEP on take long, so that a signal finds it at work."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppattn.cli import main
from ppattn.engine import trainer
from tests.helpers.abridged import abridged

honest = trainer.update


def update(run) -> None:
    honest(run)
    if run.state.progress.step >= int(sys.argv[1]):
        time.sleep(0.3)


if __name__ == "__main__":
    trainer.update = update
    with abridged():
        sys.exit(main("train", sys.argv[2:]))
