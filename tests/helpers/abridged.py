"""What takes many times longer than a small run or export itself, and what stands for it in the tests.

Pictures, traced MACs, tables of costs, and Python processes for an export's engines; `unabridged` brings them back.
"""

import io
import subprocess
import sys
import traceback
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

from ppattn import linearize
from ppattn.deploy import checks, engines, exporter
from ppattn.engine import evaluate, metrics


def here(*arguments, limit=None):
    """`ppattn.deploy.checks.run_python` in this process, which has Paddle already."""
    argv, output = ["-c", *map(str, arguments[2:])], io.StringIO()
    with patch.object(sys, "argv", argv), redirect_stdout(output), redirect_stderr(output):
        try:
            engines.main(*argv[1:]) if arguments[0] == "-m" else exec(arguments[1], {})
        except Exception:
            return subprocess.CompletedProcess(arguments, 1, "", traceback.format_exc())
    return subprocess.CompletedProcess(arguments, 0, "", "")


def nothing(*_):
    pass


COST = SimpleNamespace(params=metrics.cost.params, macs=lambda *_: 10**6)
ABRIDGED = {
    metrics: {"add_pictures": nothing, "draw_curves": nothing, "cost": COST},
    evaluate: {"draw_confusion": nothing, "draw_predictions": nothing},
    linearize: {"measure_costs": lambda *_: [], "draw_linearized": nothing},
    checks: {"run_python": here},
    exporter: {"run_python": here},
}
WHOLE = {module: {name: vars(module)[name] for name in names} for module, names in ABRIDGED.items()}


@contextmanager
def _using(values, after):
    for module in values:
        vars(module).update(values[module])
    yield
    for module in after:
        vars(module).update(after[module])


abridged, whole = partial(_using, ABRIDGED, WHOLE), partial(_using, WHOLE, ABRIDGED)
