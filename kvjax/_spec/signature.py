"""Signatures that are made of the fields of a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

from kvjax._values.errors import meant

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Named(Protocol[P, R_co]):
    """A function of a name and of what a dataclass is made of. (A Concatenate would have no keyword ``name``.)"""

    def __call__(self, name: str, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def takes(arguments: Callable[P, A]) -> Callable[[Callable[[str, A], R]], Named[P, R]]:
    """Has a function of a name and a dataclass take the dataclass's fields as keyword arguments instead.

    Args:
      arguments: the dataclass, of keyword-only fields.
    """

    def decorate(function: Callable[[str, A], R]) -> Named[P, R]:
        name = inspect.Parameter("name", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="str")
        fields = inspect.signature(arguments).parameters.values()
        result = inspect.signature(function).return_annotation
        signature = inspect.Signature([name, *fields], return_annotation=result)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                unknown = [name for name in kwargs if name not in signature.parameters]
                hint = meant(unknown[0], signature.parameters).strip() if unknown else ""
                raise TypeError(f"{function.__name__}() {error}{hint and '; '}{hint}") from None
            make: Callable[..., A] = arguments
            return function(given.pop("name"), make(**given))

        call.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]  # inspect reads it all the same
        call.__annotations__ = {p.name: p.annotation for p in (name, *fields)} | {"return": result}
        return call

    return decorate
