"""Safe tracing of programs."""

import contextlib
import importlib
from collections.abc import Iterator


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Programs are traced inside, so that one that fails cannot crash the process later.

    Paddle 3.3 keeps the values of a trace under the address of its program, and drops them only where the trace
    succeeds. A later program at that address takes them for its own, and reads memory that is gone.
    """
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    for folder in ("dy2static", "pir_dy2static"):  # of Paddle 3.3 and 3.1; a later one may have no such record
        with contextlib.suppress(ImportError, AttributeError):
            recorder = importlib.import_module(f"paddle.jit.{folder}.parameter_recorder")
            recorder._global_parameter_recorder.__init__()
            recorder._global_inplace_map.__init__()
