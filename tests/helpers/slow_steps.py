"""`slow_steps.py STEP -c ...`: training whose steps from STEP on take long, so that a signal finds it at work."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppattn.cli import main
from ppattn.engine import trainer
from tests.helpers.abridged import abridged


def install(first: int) -> None:
    honest = trainer.update

    def update(run) -> None:
        honest(run)
        if run.state.progress.step >= first:
            time.sleep(0.3)

    trainer.update = update


if __name__ == "__main__":
    install(int(sys.argv[1]))
    with abridged():
        sys.exit(main("train", sys.argv[2:]))
