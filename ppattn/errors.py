"""The one exception that means: the user can mend this."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Wrong input; the message is one or two sentences that say what was given, what is allowed and what to do.

    Every tool turns it into exit code 2 without a traceback.
    """


class Preempted(Exception):
    """Training was stopped by a signal after its state was saved; every tool turns it into exit code 75."""


def unknown(kind: str, given: object, allowed: Iterable[str]) -> UserError:
    """`UserError` for a name that is not among `allowed`, with the nearest right one."""
    allowed = sorted(allowed)
    near = difflib.get_close_matches(str(given), allowed, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    shown = ", ".join(allowed[:40]) + (f", ... ({len(allowed)} in all)" if len(allowed) > 40 else "")
    return UserError(f"Unknown {kind} {str(given)!r}.{hint} Allowed: {shown}.")
