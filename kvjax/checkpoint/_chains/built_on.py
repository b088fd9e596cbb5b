"""What builds on a checkpoint: the deltas that no longer restore once another has taken its place."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvjax._formats.manifest import has_manifest
from kvjax._formats.paths import AnyPath
from kvjax.checkpoint._chains.catalog import Catalog
from kvjax.checkpoint._chains.chain import Chain, beside
from kvjax.checkpoint._chains.locate import UNDER_WAY
from kvjax.checkpoint._disk.files import is_same, json_at
from kvjax.checkpoint._disk.format import META, Damaged

_MOST_NAMED = 3


def built_on(place: AnyPath, chain: Chain | None = None) -> list[AnyPath]:
    """The checkpoints that need one: deltas that build on it, those that build on these, and so on.

    Only the manifests and kvjax.json of what is beside it are read. A delta of which a copy of the base, or what was
    compacted for it, is elsewhere beside it does not need it.

    Args:
      place: where the checkpoint is, if there is one.
      chain: one that is being read, whose checkpoint may be elsewhere.
    """
    needed, others = set(Catalog(place).digests), dict[AnyPath, tuple[set[str], set[str]]]()
    for path in itertools.chain(*(group() for group in beside(place))) if needed else ():
        hidden = path.name.startswith(".") or UNDER_WAY in str(path)  # on its way to its place, or from it
        if not hidden and _is_another(path, place):
            others[path] = set(Catalog(path).digests), _bases_of(path)
    found: list[AnyPath] = []
    while True:
        kept = set[str]().union(*(digests for digests, _ in others.values()))
        more = [path for path, (_, bases) in others.items() if (bases & needed) - kept]
        if not more:
            break
        for path in more:
            needed |= others.pop(path)[0]
        found += more
    found.sort(key=str)
    if chain is not None and _is_below(place, chain) and chain.catalog.directory.resolve() not in found:
        found.insert(0, chain.catalog.directory)
    return found


def listed(paths: Sequence[AnyPath]) -> str:
    """Some checkpoints, and that they build: "a, b and 3 more build"."""
    more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
    return f"{', '.join(map(str, paths[:_MOST_NAMED]))}{more} {'builds' if len(paths) == 1 else 'build'}"


def _is_another(path: AnyPath, place: AnyPath) -> bool:
    """Whether a checkpoint is at a path that may be read, and another than that of a place."""
    try:
        return has_manifest(path) and not is_same(path, place)
    except FileNotFoundError:  # a manager has just deleted it
        return False


def _is_below(place: AnyPath, chain: Chain) -> bool:
    links = itertools.chain(*(chain.links(name)[1:] for name in chain.names))
    bases = {link.meta["delta"]["since"] for link in links}
    return any(all(is_same(place, copy.directory) for copy in chain.copies(base)) for base in bases)


def _bases_of(checkpoint: AnyPath) -> set[str]:
    """The digests that a checkpoint's tables say they build on; of those that can be read."""
    found = set[str]()
    for path in checkpoint.glob(f"*/{META}"):
        try:
            match json_at(path):
                case {"delta": {"since": str(digest)}}:
                    found.add(digest)
                case _:
                    pass
        except (Damaged, OSError):
            continue
    return found
