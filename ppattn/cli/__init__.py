"""The command line: one module per verb, one place for exit codes.

A verb module has a docstring (what `--help` says), `add_arguments(parser)` and `run(args)`. It imports nothing heavy at
its top, so that `--help` answers at once. Exit codes: 0 done, 2 the user's input is wrong, or the disk or the memory is
full, 75 stopped by a signal with its state saved, 1 anything else; a traceback means a defect of this project.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from ppattn import __version__
from ppattn.cli.streams import discard, standard_streams
from ppattn.errors import FULL_DISK, Preempted, UserError, unknown
from ppattn.text import printable

VERBS = ("train", "eval", "export", "predict", "convert", "benchmark", "analyze", "check", "list")
ENDS_WITH_ITS_READER = {"list", "predict"}  # all that they do is print; the others finish their work
NOT_OURS = (errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ESTALE)


def main(verb: str | Sequence[str] | None = None, argv: Sequence[str] | None = None, doc: str | None = None) -> int:
    """Run a verb in this process and return its exit code.

    Args:
        verb: its name, or the whole command line as a list; None takes the process's own.
        argv: the arguments of a named verb; None takes the process's own.
        doc: what `--help` says first.
    """
    given = argv if verb is None or isinstance(verb, str) else verb
    line = [*([verb] if isinstance(verb, str) else []), *(sys.argv[1:] if given is None else given)]
    with standard_streams(lasting=ENDS_WITH_ITS_READER.isdisjoint(line[:1])):
        return guarded(lambda: _run(line, doc))


def _run(line: list[str], doc: str | None) -> None:
    usage = f"usage: ppattn {{{','.join(VERBS)}}} ..."
    if not line:
        raise UserError(f"Name what to do; {usage}")
    verb, *argv = line
    if verb in ("-h", "--help", "--version"):
        print(f"ppattn {__version__}" if verb == "--version" else usage)
        return
    if verb not in VERBS:
        raise unknown("verb", verb, VERBS)
    module = importlib.import_module(f"ppattn.cli.{verb}")
    parser = argparse.ArgumentParser(
        prog=f"ppattn {verb}", description=doc or module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"ppattn {__version__}")
    module.add_arguments(parser)
    if any("\0" in argument for argument in argv):
        raise UserError("An argument holds the character NUL, which no name has.")
    module.run(parser.parse_args(argv))
    sys.stdout.flush()


def guarded(run: Callable[[], None]) -> int:
    """Call `run` and return the exit code, with a sentence on stderr for what the user can mend."""
    try:
        if sys.version_info < (3, 10):  # noqa: UP036 (run from a checkout, nothing checks it before)
            raise UserError(f"ppattn needs Python 3.10 to 3.13, this is {sys.version.split()[0]}.")
        run()
        return 0
    except SystemExit as stop:  # of argparse, which has said why
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except UserError as error:
        return _tell(str(error))
    except BrokenPipeError:  # of stdout, as in `list | head -1`
        discard(sys.stdout)
        return 1
    except Preempted as stop:
        print(stop, file=sys.stderr)
        return 75
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1
    except Exception as error:
        return _tell(_reason(error))


def _reason(error: Exception) -> str | None:
    """What the user can do about an error that no boundary has made a sentence of; None for a defect."""
    if isinstance(error, ModuleNotFoundError) and not (error.name or "ppattn").startswith("ppattn"):
        return (
            f"{sys.executable} has no module {error.name!r}: run `bash scripts/setup.sh` and use .venv/bin/python, "
            "or `pip install -r requirements-cpu.txt`."
        )
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError) or number == errno.ENOMEM or "ResourceExhausted" in str(error):
        return "There is not enough memory: take a smaller image size, batch or model."
    if isinstance(error, OSError):
        place = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        if number in FULL_DISK:
            return f"{place}The disk is full; make room and run again."
        if place or number in NOT_OURS:  # a file or folder of the user's that cannot be read or written
            return f"{place}{error.strerror or error}."
    return None


def _tell(sentence: str | None) -> int:
    """Print it as the error and return 2; without one print the traceback of the present error and return 1."""
    if sentence is None:
        traceback.print_exc()
        print("This is a defect of ppattn: please report it with the lines above.", file=sys.stderr)
        return 1
    text = printable(" ".join(sentence.split()))
    if len(text) > 1000:
        text = f"{text[:700]} ... {text[-200:]}"
    print(f"error: {text}", file=sys.stderr)
    return 2


def console() -> None:
    """Entry point of the installed `ppattn` command."""
    sys.exit(main())
