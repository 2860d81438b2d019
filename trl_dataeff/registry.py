"""`PluginRegistry`: classes by name, registered by a decorator or offered by an installed package's entry points."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib import metadata
from typing import Any, Generic, TypeVar


T = TypeVar("T")
C = TypeVar("C", bound=type)


class PluginRegistry(Generic[T]):
    """
    Classes of one kind, by name. An entry point is imported when its name is first asked for.

    Args:
        base (`type`): class that registered classes derive from. Registration sets their attribute `name`.
        kind (`str`): what one of them is, for messages, such as `"predictor"`.
        group (`str`): entry point group, such as `"trl_dataeff.predictors"`.
        error (`type`): exception that is raised.
    """

    def __init__(self, base: type[T], kind: str, group: str, error: type[Exception]):
        self.base, self.kind, self.group, self.error = base, kind, group, error
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """
        Class decorator that registers a class as `name` and sets its attribute `name`.

        Args:
            name (`str`): the name; not empty.

        Raises:
            Exception: (of type `error`) the name belongs to another class, or the class does not derive from `base`.
        """

        def decorate(cls: C) -> C:
            self._add(name, cls)
            return cls

        return decorate

    def _add(self, name: str, cls: Any) -> None:
        if not name or not isinstance(cls, type) or not issubclass(cls, self.base):
            raise self.error(
                f"{cls!r} cannot be registered as {name!r}: a {self.kind} needs a name and is a subclass of "
                f"{self.base.__name__}."
            )
        taken = self._classes.get(name)
        if taken is not None and _path(taken) != _path(cls):  # a module may be imported again
            raise self.error(
                f"The name {name!r} belongs to the {self.kind} {_path(taken)} already. Register {_path(cls)} under "
                "another name."
            )
        self._classes[name] = cls
        cls.name = name  # type: ignore[attr-defined]

    def name_of(self, cls: type) -> str | None:
        """Name that a class itself is registered as, or `None`; a name that it inherits does not count."""
        name = getattr(cls, "name", "")
        return name if self._classes.get(name) is cls else None

    def __contains__(self, name: object) -> bool:
        """Whether there is a class of this name. Entry points take a while to read: only if none is registered."""
        return name in self._classes or name in self.names()

    def names(self) -> list[str]:
        """All names in alphabetical order: registered ones, and those of entry points, which are not imported."""
        return sorted({*self._classes, *(point.name for point in metadata.entry_points(group=self.group))})

    def get(self, name: str) -> type[T]:
        """
        Class of a name.

        Raises:
            Exception: (of type `error`) there is no such name, or its entry point cannot be imported.
        """
        if name not in self._classes:
            points = [point for point in metadata.entry_points(group=self.group) if point.name == name]
            if not points:
                raise self.error(self._unknown(name))
            if len({point.value for point in points}) > 1:
                raise self.error(
                    f"Several installed packages offer a {self.kind} {name!r}: "
                    f"{', '.join(_source(point) for point in points)}. Uninstall all but one."
                )
            self._import(points[0])
        return self._classes[name]

    def _import(self, point: metadata.EntryPoint) -> None:
        source = f"The {self.kind} {point.name!r} of {_source(point)}"
        try:
            cls: Any = point.load()
        except Exception as error:
            raise self.error(
                f"{source} cannot be imported ({type(error).__name__}: {error}). Fix or uninstall that package."
            ) from error
        if not isinstance(cls, type) or not issubclass(cls, self.base):
            raise self.error(f"{source} is {cls!r}, not a subclass of {self.base.__name__}. Fix that package.")
        named = self.name_of(cls)
        if named not in (None, point.name):
            raise self.error(f"{source} is registered as {named!r} in its own code. Give both the same name.")
        self._add(point.name, cls)

    def _unknown(self, name: str) -> str:
        known = self.names()
        close = difflib.get_close_matches(name, known, n=1)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        return (
            f"There is no {self.kind} {name!r}; known are {', '.join(map(repr, known))}.{meant} To add your own, decorate "
            f"its class with @register_{self.kind}({name!r}) in a module that is imported, or install a package with an "
            f"entry point in {self.group!r}."
        )


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _source(point: metadata.EntryPoint) -> str:
    distribution = getattr(point, "dist", None)
    package = distribution.name if distribution else "an installed package"
    return f"{package} (entry point {point.value!r} in {point.group!r})"
