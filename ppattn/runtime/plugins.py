"""Modules of the user: their own attentions, backbones and data sets."""

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

from ppattn.errors import UserError
from ppattn.runtime.startup import import_paddle

IMPORTED: dict[str, str] = {}  # modules of the user, with the folder that was searched besides the usual places


def import_modules(names: Iterable[str], folder: str | Path | None = None) -> None:
    """Import modules that register a user's own attentions, backbones or data sets.

    Args:
        folder: searched after the usual places, so that nothing in it replaces a package; default: the current one.

    Raises:
        UserError: for a module that is not there, does not import, or has the name of an installed one.
    """
    folder = str(Path(folder or Path.cwd()).resolve())
    for name in names:
        if name in IMPORTED:
            continue
        if folder not in sys.path:
            sys.path.append(folder)
        import_paddle()
        try:
            module = importlib.import_module(name)
        except Exception as error:
            hint = f" Write {name[:-3]!r}." if name.endswith(".py") else ""
            text = f"The module {name!r} does not import from {folder} ({type(error).__name__}: {error}).{hint}"
            raise UserError(text) from None
        own = Path(folder, *name.split(".")).with_suffix(".py")
        if own.is_file() and own != Path(module.__file__ or "").resolve():
            raise UserError(f"{own} has the name of an installed module, which Python takes instead; rename it.")
        IMPORTED[name] = folder
