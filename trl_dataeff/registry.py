"""`Registry`: names of plug-ins, registered in code or through an entry point."""

from __future__ import annotations

import difflib
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar


T = TypeVar("T", bound=Callable[..., Any])


class Registry(Generic[T]):
    """
    Maps names to classes or factories.

    A name that is not registered is looked up among the installed packages' entry points, which are imported only then.

    Args:
        kind (`str`): what is registered, for messages: `"selector"`.
        group (`str`): entry point group: `"trl_dataeff.selectors"`.
        error (`type`, *optional*, defaults to `ValueError`): exception type for unknown names and wrong arguments.
    """

    def __init__(self, kind: str, group: str, error: type[Exception] = ValueError):
        self.kind, self.group, self.error = kind, group, error
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that registers a class or a factory under `name`. A taken name is an error."""

        def decorate(entry: T) -> T:
            present = self._entries.get(name)
            # A module that is imported again (a notebook, `importlib.reload`) replaces its own entries
            if present is not None and _path(present) != _path(entry):
                raise self.error(
                    f"The {self.kind} name {name!r} is taken by {_path(present)}. Register {_path(entry)} under another."
                )
            self._entries[name] = entry
            return entry

        return decorate

    def names(self) -> list[str]:
        """Names that can be used: registered ones, and those of entry points."""
        return sorted({*self._entries, *(point.name for point in self._entry_points())})

    def get(self, name: str) -> T:
        """
        The class or factory of a name.

        Raises:
            `error`: the name is unknown, or its entry point cannot be imported.
        """
        if name in self._entries:
            return self._entries[name]
        for point in self._entry_points():
            if point.name == name:
                return self._load(point)
        names = self.names()
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise self.error(
            f"Unknown {self.kind} {name!r}; the known ones are {', '.join(map(repr, names))}.{hint} A {self.kind} of your "
            f"own is registered with `@register_{self.kind}({name!r})`, in a module that is imported before training, or "
            f"with an entry point in the group `{self.group}`."
        )

    def make(self, name: str, arguments: dict[str, Any]) -> Any:
        """
        Call the class or factory of `name` with keyword arguments.

        Raises:
            `error`: the name is unknown, or an argument is unknown or missing.
        """
        self.check(name, arguments)
        return self.get(name)(**arguments)

    def check(self, name: str, arguments: dict[str, Any]) -> None:
        """Raise what [`make`] would raise for an unknown name or wrong arguments, and make nothing."""
        entry = self.get(name)
        try:
            inspect.signature(entry).bind(**arguments)
        except TypeError as error:
            takes = [p for p in inspect.signature(entry).parameters if p != "self"]
            raise self.error(
                f"The {self.kind} {name!r} cannot be made from {arguments}: {error}. Its arguments are "
                f"{', '.join(takes) or 'none'}."
            ) from error

    def _entry_points(self) -> list[importlib.metadata.EntryPoint]:
        return list(importlib.metadata.entry_points(group=self.group))

    def _load(self, point: importlib.metadata.EntryPoint) -> T:
        try:
            entry = point.load()
        except Exception as error:  # whatever the other package's import raises
            raise self.error(
                f"The {self.kind} {point.name!r} of the entry point `{point.value}` cannot be imported "
                f"({type(error).__name__}: {error}). Repair or uninstall the package that provides it."
            ) from error
        return self._entries.setdefault(point.name, entry)


def _path(entry: Any) -> str:
    return f"{entry.__module__}.{entry.__qualname__}"
