"""Signatures that are made of the fields of a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from kvjax._values.errors import meant

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
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
        signature = _with_fields(name, arguments, inspect.signature(function).return_annotation)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            given = _bound(signature, function.__name__, args, kwargs)
            make: Callable[..., A] = arguments
            return function(given.pop("name"), make(**given))

        return _signed(call, signature)

    return decorate


def initialized_by(arguments: Callable[P, A]) -> Callable[[Callable[[S, A], None]], Callable[Concatenate[S, P], None]]:
    """The same for an ``__init__``, which takes the dataclass's fields as they come.

    Args:
      arguments: the dataclass.
    """

    def decorate(function: Callable[[S, A], None]) -> Callable[Concatenate[S, P], None]:
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = _with_fields(itself, arguments, "None")

        @functools.wraps(function)
        def call(self: Any, /, *args: Any, **kwargs: Any) -> None:
            given = _bound(signature, type(self).__name__, (self, *args), kwargs)
            make: Callable[..., A] = arguments
            function(given.pop("self"), make(**given))

        return _signed(call, signature)

    return decorate


def _with_fields(first: inspect.Parameter, arguments: Callable[..., Any], result: Any) -> inspect.Signature:
    return inspect.Signature([first, *inspect.signature(arguments).parameters.values()], return_annotation=result)


def _bound(signature: inspect.Signature, called: str, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, or Python's error about them, with what may have been meant."""
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        unknown = [name for name in kwargs if name not in signature.parameters]
        hint = meant(unknown[0], signature.parameters).strip() if unknown else ""
        named = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
        if not hint and named and len(args) > len(signature.parameters) - len(named):
            hint = f"give options by their names, as {named[0]}="
        raise TypeError(f"{called}() {error}{hint and '; '}{hint}") from None


def _signed(call: Any, signature: inspect.Signature) -> Any:
    call.__signature__ = signature  # inspect reads it, whatever it is of
    call.__annotations__ = {p.name: p.annotation for p in signature.parameters.values() if p.name != "self"}
    call.__annotations__["return"] = signature.return_annotation
    return call
