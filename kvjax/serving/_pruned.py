"""Pruned releases: the rules by which deltas can be followed, and how a release records its rule."""

from __future__ import annotations

from kvjax._values.errors import fail
from kvjax._values.prune import Prune, PruneLike, as_rule

_OF_ALL = {
    "max_age": "rows that have not changed grow older, too",
    "top_k": "which rows are the most frequent depends on all of them",
}
"""Rules about more than a row alone, and why changed rows do not say what they leave out."""


def followed(prune: PruneLike) -> Prune:
    """The rule, if what it leaves out of a table follows from what it left out before and from changed rows.

    Raises:
      ValueError: it does not, or nobody can say by which rule rows were left out before.
    """
    rule = as_rule(prune)
    for name, why in _OF_ALL.items():
        if (value := getattr(rule, name)) is not None:
            raise fail(
                ValueError, None, "follow", "a prune= that asks about one row alone (min_frequency, min_norm, "
                "zero_rows, predicate, keep, remove)", f"{name}={value}: {why}, and a delta has only the rows that "
                "have changed", "publish the whole checkpoint, by Releases.publish({name: path}, prune=); or have the "
                "trainer evict such rows (kvjax.evict), whose keys are removed in its deltas",
            )  # fmt: skip
    if rule.predicate is not None and not _has_own_name(rule.predicate):
        raise fail(
            ValueError, None, "follow", "a predicate with a name of its own, by which the next call knows that rows "
            "that have not changed were left out by the same one", f"{rule.predicate!r:.100}",
            "def it in a module, outside of functions and classes, with its numbers in it",
        )  # fmt: skip
    return rule


def _has_own_name(predicate: object) -> bool:
    """Whether no other function has its name, as two lambdas, two closures of one function, and the methods of two
    objects have."""
    bound = getattr(predicate, "__self__", None) is not None or getattr(predicate, "__closure__", None)
    return not bound and "<" not in getattr(predicate, "__qualname__", "<lambda>")
