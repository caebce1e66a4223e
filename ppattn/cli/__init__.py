"""The command line: one module per verb, one place for exit codes.

A verb module has a docstring (what `--help` says) and `run(args)`; options.yaml has its options. It imports nothing
heavy at its top, so that `--help` answers at once. Exit codes: 0 done, 2 wrong input, a full disk or too little memory,
75 stopped by a signal with its state saved, 1 anything else; a traceback means a defect of this project.
"""

import argparse
import errno
import importlib
import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppattn import __version__
from ppattn.errors import FULL_DISK, Preempted, UserError, install_command, unknown_name
from ppattn.files.tables import read_table
from ppattn.text import aligned_table, printable

OPTIONS = read_table(Path(__file__).with_name("options.yaml"))
VERBS = [verb for verb in OPTIONS if verb != "shared"]
TYPES = {"int": int, "float": float}
HOME = re.compile(r"(?<![^=])~[^/]*/.*")  # the shell leaves that of `--output=~/runs` as it is


def main(verb: str | Sequence[str] | None = None, argv: Sequence[str] | None = None, doc: str | None = None) -> int:
    """Run a verb in this process and return its exit code.

    `verb` is its name, or the complete command line as a list; `argv` are the arguments of a named verb; None takes
    the process's own. `doc` is what `--help` says first.
    """
    given = argv if verb is None or isinstance(verb, str) else verb
    line = [*([verb] if isinstance(verb, str) else []), *(sys.argv[1:] if given is None else given)]
    return guarded(lambda: _run(line, doc))


def _run(line: list[str], doc: str | None) -> None:
    usage = f"usage: ppattn {{{','.join(VERBS)}}} ..."
    if not line:
        raise UserError(f"Name what to do; {usage}")
    verb, *argv = line
    if verb in ("-h", "--help", "--version"):
        print(f"ppattn {__version__}" if verb == "--version" else f"{usage}\n\n{_verbs()}")
        return
    if verb not in VERBS:
        raise unknown_name("verb", verb, VERBS)
    module = importlib.import_module(f"ppattn.cli.{verb}")
    parser = argparse.ArgumentParser(
        prog=f"ppattn {verb}", description=doc or module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"ppattn {__version__}")
    _add_options(parser, OPTIONS[verb])
    text = "with your own attentions, backbones or data"
    parser.add_argument("--imports", action="append", default=[], metavar="MODULE", help=text)
    args = parser.parse_args([HOME.sub(lambda part: os.path.expanduser(part[0]), item) for item in argv])
    if args.imports:
        from ppattn.runtime.plugins import import_modules

        import_modules(args.imports)
    module.run(args)


def _add_options(parser: Any, options: dict[str, dict]) -> None:
    """Add options to a parser or a group of options that exclude each other, see options.yaml."""
    for names, settings in options.items():
        if names in ("one of", "at most one"):
            _add_options(parser.add_mutually_exclusive_group(required=names == "one of"), settings)
        else:
            kind = {"type": TYPES[settings["type"]]} if "type" in settings else {}
            parser.add_argument(*names.split(", "), **settings | kind)


def _verbs() -> str:
    """A line per verb, from the first lines of their files: importing all of them would take time."""
    files = [(verb, Path(__file__).with_name(f"{verb}.py")) for verb in VERBS]
    rows = [[f"  {verb}", file.read_text(encoding="utf-8").split("\n")[0].strip('"')] for verb, file in files]
    return "\n".join([*aligned_table(rows), "", "`ppattn VERB --help` lists the options of a verb."])


def guarded(run: Callable[[], object]) -> int:
    """Call `run` and return the exit code; user errors go to stderr without a traceback."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this: the next file would take its number
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files in any encoding
    main_thread = threading.current_thread() is threading.main_thread()
    stops = [n for n in (signal.SIGTERM, signal.SIGHUP) if main_thread and signal.getsignal(n) == signal.SIG_DFL]
    for number in stops:
        signal.signal(number, signal.default_int_handler)  # like Ctrl-C, so that nothing half done is left behind
    try:
        run()
        sys.stdout.flush()
        return 0
    except SystemExit as stop:  # of argparse, which has said why
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BrokenPipeError:  # the reader of stdout left, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Preempted as stop:
        with suppress(OSError):  # the terminal may be closed
            print(stop, file=sys.stderr)
        return 75
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            traceback.print_exc()
            print("This is a defect of ppattn: please report it with the lines above.", file=sys.stderr)
            return 1
        print("error:", "\n".join(map(printable, reason.splitlines())), file=sys.stderr)
        return 2
    finally:
        for number in stops:
            if signal.getsignal(number) == signal.default_int_handler:  # a training that was stopped may ignore it now
                signal.signal(number, signal.SIG_DFL)


def _reason(error: Exception) -> str | None:
    """A sentence about an error that the user can correct; None for a defect."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and not (error.name or "ppattn").startswith("ppattn"):
        advice = f"run `bash scripts/setup.sh` and use .venv/bin/python, or `{install_command('cpu')}`"
        return f"{sys.executable} has no module {error.name!r}: {advice}."
    number, file = (error.errno, error.filename) if isinstance(error, OSError) else (None, None)
    if isinstance(error, MemoryError) or number == errno.ENOMEM or "ResourceExhausted" in str(error):
        return "There is not enough memory: take a smaller image size, batch or model."
    if number in FULL_DISK:
        return f"{f'{file}: ' if file else ''}The disk is full; make room and run again."
    if isinstance(error, OSError) and (file or number == errno.EIO):  # that cannot be read or written
        return f"{file or 'A disk'}: {error.strerror}."
    return None


def console() -> None:
    """Entry point of the installed `ppattn` command."""
    sys.exit(main())
