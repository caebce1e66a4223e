"""Named objects, with filters and suggestions for misspelt names."""

import fnmatch
from collections.abc import Callable
from typing import Any

from ppattn.errors import unknown_name


class Registry:
    """A table of one kind of thing: `@REGISTRY.register("name")`, `REGISTRY.get(name)`, `REGISTRY.list("in*")`."""

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, object] = {}

    def register(self, name: str) -> Callable:
        def add(entry):
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> Any:
        """The entry called `name`; raises `UserError` naming the nearest one otherwise."""
        if name not in self._entries:
            raise unknown_name(self.kind, name, self._entries)
        return self._entries[name]

    def name_of(self, entry: object) -> str:
        """The name that an entry is registered by."""
        return next(name for name, known in self._entries.items() if known is entry)

    def list(self, pattern: str = "*") -> list[str]:
        """Names that match the shell pattern, in the order of registration."""
        return [name for name in self._entries if fnmatch.fnmatch(name, pattern)]
