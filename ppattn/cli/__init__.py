"""The command line: one module per verb, one place for exit codes.

A verb module has `HELP` (a line), `add_arguments(parser)` and `run(args)`. It imports nothing heavy at its top, so that
`--help` answers at once. Exit codes: 0 done, 2 the user's input is wrong, 75 stopped by a signal with its state saved,
1 anything else.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable

from ppattn.errors import Preempted, UserError, unknown

VERBS = ("train", "eval", "export", "predict", "convert", "benchmark", "analyze", "check", "list")


def main(verb: str | None = None, argv: list[str] | None = None, doc: str | None = None) -> int:
    """Run a verb and return its exit code; without `verb` its name is the first argument."""
    argv = sys.argv[1:] if argv is None else argv
    if verb is None:
        if not argv or argv[0] in ("-h", "--help"):
            print(f"usage: ppattn {{{','.join(VERBS)}}} ...", file=sys.stdout if argv else sys.stderr)
            return 0 if argv else 2
        if argv[0] not in VERBS:
            print(f"error: {unknown('verb', argv[0], VERBS)}", file=sys.stderr)
            return 2
        verb, argv = argv[0], argv[1:]
    module = importlib.import_module(f"ppattn.cli.{verb}")
    parser = argparse.ArgumentParser(
        prog=f"ppattn {verb}", description=doc or module.HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    args = parser.parse_args(argv)
    return guarded(lambda: module.run(args))


def guarded(run: Callable[[], None]) -> int:
    """Call `run` and return the exit code, with a sentence on stderr for what the user can mend."""
    try:
        if sys.version_info < (3, 10):  # noqa: UP036 (run from a checkout, nothing checks it before)
            raise UserError(f"ppattn needs Python 3.10 to 3.13, this is {sys.version.split()[0]}.")
        run()
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        if (error.name or "ppattn").startswith("ppattn"):
            raise
        print(
            f"error: {sys.executable} has no module {error.name!r}: run `bash scripts/setup.sh` and use "
            ".venv/bin/python, or `pip install -r requirements-cpu.txt`.",
            file=sys.stderr,
        )
        return 2
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # of stdout, as in `list | head -1`; what is left in its buffer must go somewhere at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MemoryError:
        print("error: There is not enough memory: take a smaller image size, batch or model.", file=sys.stderr)
        return 2
    except OSError as error:  # a file or folder of the user's that cannot be read or written
        place = f"{error.filename}: " if error.filename else ""
        print(f"error: {place}{error.strerror or error}.", file=sys.stderr)
        return 2
    except Preempted as stop:
        print(stop, file=sys.stderr)
        return 75
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1
    return 0


def console() -> None:
    """Entry point of the installed `ppattn` command."""
    sys.exit(main())
