"""Signatures that are made of the fields of a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")


def takes(arguments: Callable[P, A]) -> Callable[[Callable[[str, A], R]], Callable[Concatenate[str, P], R]]:
    """Has a function of a name and a dataclass take the dataclass's fields as keyword arguments instead.

    Args:
      arguments: the dataclass, of keyword-only fields.
    """

    def decorate(function: Callable[[str, A], R]) -> Callable[Concatenate[str, P], R]:
        name = inspect.Parameter("name", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="str")
        fields = inspect.signature(arguments).parameters.values()
        result = inspect.signature(function).return_annotation
        signature = inspect.Signature([name, *fields], return_annotation=result)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            given = signature.bind(*args, **kwargs).arguments
            make: Callable[..., A] = arguments
            return function(given.pop("name"), make(**given))

        call.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        return call

    return decorate
