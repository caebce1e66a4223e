"""Modules of the user: their own attentions, backbones and data sets."""

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from ppattn.errors import UserError
from ppattn.runtime.startup import import_paddle

IMPORTED: dict[str, str] = {}  # modules of the user, with the folder that was searched besides the usual places


def import_modules(names: Iterable[str], folder: str | Path | None = None, run: Path | None = None) -> None:
    """Import modules that register a user's own attentions, backbones or data sets.

    `folder` (default: the current one) is searched after the usual places, so that nothing in it replaces a package.
    `run` is the run folder that names the modules; it may come from anybody, so none in it is imported.
    """
    folder = str(Path(folder or Path.cwd()).resolve())
    for name in names:
        if folder not in sys.path:
            sys.path.append(folder)
        import_paddle()
        try:
            if run and name not in IMPORTED and _inside(name, run):
                raise UserError(f"The module {name!r} is in the run folder {run}: to trust it, add --imports {name}.")
            module = importlib.import_module(name)
        except UserError:
            raise
        except Exception as error:
            hint = f" Write {name[:-3]!r}." if name.endswith(".py") else ""
            text = f"The module {name!r} does not import from {folder} ({type(error).__name__}: {error}).{hint}"
            raise UserError(text) from None
        own = Path(folder, *name.split(".")).with_suffix(".py")
        if own.is_file() and own.resolve() != Path(module.__file__ or "").resolve():
            taken = "a module imported before: restart Python" if name in IMPORTED else "an installed module: rename it"
            raise UserError(f"{own} is not what Python takes for {name!r}, since it has the name of {taken}.")
        IMPORTED.setdefault(name, folder)


def _inside(name: str, folder: Path) -> bool:
    """Whether a module or its package would come out of a folder; nothing is imported to find out."""
    spec = importlib.util.find_spec(name.partition(".")[0])
    places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
    found = [p for place in places if place for p in (Path(place).resolve(), Path(place).parent.resolve())]
    return any(path.is_relative_to(folder.resolve()) for path in found)
