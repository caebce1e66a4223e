"""The exception for what the user can correct, and helpers that raise it."""

import difflib
import errno
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(Exception):
    """Wrong input; the message says what was given, what is allowed and what to do. Exit code 2, no traceback."""


class Preempted(Exception):
    """Training was stopped by a signal after its state was saved. Exit code 75."""


def unknown_name(kind: str, given: object, allowed: Iterable[str], prefix: str = "") -> UserError:
    """`UserError` for a name that is not among `allowed`, with the nearest one; `prefix` goes before both names."""
    allowed = sorted(allowed)
    hint = nearest_name(str(given).lower(), allowed, prefix)
    shown = ", ".join(allowed[:40]) + (f", ... ({len(allowed)} in all)" if len(allowed) > 40 else "")
    return UserError(f"Unknown {kind} {prefix + str(given)!r}.{hint} Allowed: {shown or 'none'}.")


def nearest_name(given: str, names: Sequence[str], prefix: str = "") -> str:
    """A "Did you mean ...?" suffix with the name most like the given one; empty if none is."""
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    return f" Did you mean {prefix + near[0]!r}?" if near else ""


def did_you_mean(path: str | Path, names: Iterable[str] = ()) -> str:
    """A "Did you mean ...?" suffix for a missing path, from its siblings and `names`; empty if none is near."""
    path = Path(path)
    beside = {found.name: str(found) for found in path.parent.iterdir()} if path.parent.is_dir() else {}
    known = beside | {name: name for name in names}
    near = difflib.get_close_matches(path.name, known, n=1, cutoff=0.6) if not path.exists() else []
    return f" Did you mean {known[near[0]]!r}?" if near else ""


def verb_command(verb: str) -> str:
    """The command line of a verb: `python tools/VERB.py` if this process was started so, else `ppattn VERB`."""
    return f"python tools/{verb}.py" if Path(sys.argv[0]).parent.name == "tools" else f"ppattn {verb}"


@contextmanager
def reading_untrusted(name: str | Path, what: str) -> Iterator[None]:
    """Turn any error that a library raises while it reads untrusted content into a `UserError`.

    `what` is the expected kind, as in "a tar archive". Wrap only the read; otherwise our own bugs would be blamed on
    the file. Errors of the system (no such file, a full disk) pass: they name the file themselves.
    """
    try:
        yield
    except (UserError, Preempted):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # EINVAL: a seek before the start
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(". ")
        advice = " If it is text, save it as UTF-8." if isinstance(error, UnicodeDecodeError) else ""
        raise UserError(f"{name} is damaged or not {what} ({reason}).{advice}") from None


@contextmanager
def optional_package(extra: str) -> Iterator[None]:
    """Wrap imports that need an extra of ppattn: a missing package becomes a `UserError` that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"The package {error.name} is not installed: {install_command(extra)}") from None


def install_command(extra: str) -> str:
    """The command that installs an extra: of the installed package, or of this clone."""
    source = "ppattn" if any(distributions(name="ppattn")) else Path(__file__).parents[1]
    return f"pip install '{source}[{extra}]'"
