"""Chains: a checkpoint with those that its deltas build on, found by their digests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvjax._formats.errors import FileError
from kvjax._formats.paths import AnyPath, anywhere
from kvjax._values.errors import meant, warn
from kvjax.checkpoint._chains.catalog import Catalog
from kvjax.checkpoint._chains.locate import UNDER_WAY, PathLike, all_at, is_checkpoint, locate
from kvjax.checkpoint._disk.files import Copies, Files, Stamp, modified, stamp_of
from kvjax.checkpoint._disk.format import META, CheckpointError, LostBaseError
from kvjax.checkpoint._disk.meta import EQUAL_FIELDS

T = TypeVar("T")


class Link(NamedTuple):
    """What one checkpoint of a chain has of a table: what it says, its files, and where they are."""

    meta: dict[str, Any]
    files: Files
    catalog: Catalog


class Chain:
    """A checkpoint, and for its deltas those that they build on.

    A delta says the digest of its base's manifest, which covers all that is in it. So any other base is not found, and
    neither names nor times of folders matter.

    Args:
      path: of a checkpoint, or where `locate` finds one; or its catalog.
      base: where to look for those that come before it, beside the folders next to it: checkpoints, or folders of them.
      op: what it is read for, which errors name; of a catalog that it was made for.

    Attributes:
      catalog: of the checkpoint.
      given: the checkpoints of `base`.
    """

    def __init__(
        self, path: PathLike | Catalog, base: PathLike | Sequence[PathLike] | None = None, op: str = "restore"
    ) -> None:
        self.catalog = path if isinstance(path, Catalog) else Catalog(locate(path, op), op)
        given = [] if base is None else base if isinstance(base, Sequence) and not isinstance(base, str) else [base]
        self.given = [path for each in given for path in all_at(each, self.catalog.op)]
        self._found: dict[str, list[Catalog]] = {}
        self._unread = self._nearby()

    @property
    def names(self) -> list[str]:
        """Of the tables."""
        return self.catalog.names

    def replaced(self) -> bool:
        """Whether another checkpoint has taken the place of one of these since it was read."""
        return any(
            catalog.replaced() for catalog in [self.catalog, *(c for found in self._found.values() for c in found)]
        )

    def links(self, name: str, since: Collection[str] = ()) -> list[Link]:
        """What there is of a table, from one that has all of it to the last delta.

        Args:
          name: of the table.
          since: digests of a checkpoint. If deltas build on that, those after it are enough, and it need not be there.

        Raises:
          CheckpointError: one of them is not there, or damaged.
        """
        links, seen = [Link(*self.catalog.open(name), self.catalog)], set[str]()
        while (delta := links[-1].meta.get("delta")) is not None and delta["since"] not in since:
            if delta["since"] in seen:
                raise LostBaseError(
                    f"kvjax: table {name!r}, {self.catalog.op}: want a chain of deltas, got a circle", delta["since"]
                )
            seen.add(delta["since"])
            links.append(self._base(name, delta["since"], links[-1].catalog))
        last = links[0].meta
        for delta, link in itertools.pairwise(links):
            others = [field for field in EQUAL_FIELDS if link.meta[field] != last[field]]
            if others:
                raise LostBaseError(
                    f"kvjax: table {name!r}, {self.catalog.op}: want a delta of a table of the same {others}, got "
                    f"another in {link.catalog.directory}",
                    delta.meta["delta"]["since"],
                )
        return links[::-1]

    def _base(self, name: str, digest: str, of: Catalog) -> Link:
        """A table of the checkpoint of a digest, of which there may be copies: of the first that is not damaged."""
        damage: CheckpointError | None = None
        for catalog in self.copies(digest):
            try:
                meta, files = catalog.open(name)
            except CheckpointError as error:
                damage = damage or error
                continue
            others = (c for c in self.copies(digest) if c is not catalog and c.digest == catalog.digest)
            return Link(meta, Copies(files, (Files(c.folder(name), files.entries) for c in others)), catalog)
        if damage is not None:
            raise LostBaseError(str(damage), digest) from damage
        raise LostBaseError(
            f"kvjax: table {name!r}, {of.op}: want the checkpoint of digest {digest}, on which the delta in "
            f"{of.directory} builds, got none beside it; give its folder as base=",
            digest,
        )

    def copies(self, digest: str) -> Iterator[Catalog]:
        """All checkpoints of a digest that are found, which are looked for as they are asked for."""
        given = 0
        while True:
            found = self._found.setdefault(digest, [])
            if given < len(found):
                given += 1
                yield found[given - 1]
            elif (catalog := next(self._unread, None)) is not None:
                for each in catalog.digests:
                    self._found.setdefault(each, []).append(catalog)
            else:
                return

    def _nearby(self) -> Iterator[Catalog]:
        """The checkpoints that were given, those next to this one, of a folder or of the steps of a manager, and those
        next to the given."""
        here, seen = self.catalog.directory, set[AnyPath]()
        groups: Sequence[Callable[[], Iterable[AnyPath]]] = (
            lambda: self.given,
            *beside(here),
            lambda: (path for given in self.given for path in _latest_first(given.parent)),
        )
        for group in groups:  # each is looked for once those before it have not been enough
            for path in group():
                if path not in seen:
                    seen.add(path)
                    yield Catalog(path, self.catalog.op)  # without digests, where there is no checkpoint


def beside(here: AnyPath) -> tuple[Callable[[], Iterable[AnyPath]], ...]:
    """Where checkpoints are that belong to the one at a path: those of its folder, and those of a manager's other
    steps, each looked for as it is asked for. There may be none at some of these paths, and `here` is one of them."""
    item = here.name.removesuffix(UNDER_WAY)
    return (
        lambda: _latest_first(here.parent),
        lambda: (path / item for path in _latest_first(here.parent.parent)),
    )


def chosen_tables(tables: Any, op: str) -> frozenset[str] | None:
    """The names of tables that a call is about; None for all.

    Raises:
      TypeError: they are no names.
      ValueError: there is none.
    """
    if tables is None:
        return None
    given = isinstance(tables, Collection) and not isinstance(tables, str)
    if not given or not all(isinstance(name, str) for name in tables):
        raise TypeError(f"kvjax: {op}: want tables as a list of names, got {tables!r}; give [name]")
    if not tables:
        raise ValueError(f"kvjax: {op}: want tables of one name at least, got none; leave it out for all")
    return frozenset(tables)


def only_table(chain: Chain, table: str | None) -> str:
    """The name of the table of a checkpoint that a call is about: the one that it says, or the only one.

    Raises:
      FileError: there is no such table, or it has several.
    """
    names = chain.names
    if len(names) == 1 if table is None else table in names:
        return names[0] if table is None else table
    got = f"{names}" if table is None else f"{table!r} of {names}"
    mend = "say which: table=" if table is None else meant(table, names).strip() or "give the name of one as table="
    raise FileError(chain.catalog.directory, "one table of the checkpoint", got, mend)


def unreplaced(
    path: PathLike, base: PathLike | Sequence[PathLike] | None, op: str, body: Callable[[Chain], T],
    whole: Callable[[T], bool] = lambda _: True,
) -> T:  # fmt: skip
    """As `all_unreplaced`, of one checkpoint."""
    return all_unreplaced([path], base, op, lambda chains: body(chains[0]), whole)


def all_unreplaced(
    paths: Sequence[PathLike], base: PathLike | Sequence[PathLike] | None, op: str, body: Callable[[list[Chain]], T],
    whole: Callable[[T], bool] = lambda _: True,
) -> T:  # fmt: skip
    """What body(chains) gives of checkpoints. It is asked again if another has taken the place of one that it reads.

    Args:
      paths: each as `Chain` takes it.
      base: likewise.
      op: likewise.
      body: changes nothing where it raises a `CheckpointError`.
      whole: whether what it gives is of checkpoints that were all there.
    """
    while True:
        chains = [Chain(path, base, op) for path in paths]
        try:
            found = body(chains)
            if whole(found) or not any(chain.replaced() for chain in chains):
                return found
        except CheckpointError:
            if not any(chain.replaced() for chain in chains):
                raise


Places = dict[AnyPath, Stamp | None]
"""Where a checkpoint is, as the last, and what it builds on: the stamp of each manifest when the chain was last read
whole; None if it was not."""


def places_of(path: AnyPath, known: Places) -> Places:
    """Where a checkpoint is that has just been saved, and what it builds on; says so if that is not there any more.

    Of a long chain that has been found, it looks at the stamp of each manifest, and reads them again only if one is
    another: what else is damaged there, `verify` says.

    Args:
      path: of the checkpoint.
      known: where those may be that it builds on.
    """
    here, stamp = anywhere(str(path).replace(UNDER_WAY, ""), "save"), stamp_of(path / META)
    known = {place: seen for place, seen in known.items() if place != here}
    try:
        catalog = Catalog(path, "save")
        if not any("delta" in catalog.open(name)[0] for name in catalog.names):
            return {here: stamp}
        if known and all(seen is not None and stamp_of(place / META) == seen for place, seen in known.items()):
            return known | {here: stamp}
        there = [place for place in known if is_checkpoint(place)]  # the others may come back
        chain = Chain(catalog, there)
        found = [link.catalog.directory for name in chain.names for link in chain.links(name)[:-1]]
        return {place: stamp_of(place / META) for place in (*there, *found)} | {here: stamp}
    except CheckpointError as error:
        warn(
            f"{str(error).replace(UNDER_WAY, '')}. Without that, no delta that builds on it restores, whether "
            "it was saved before this one or comes after: save the tables whole now, with the cursor, and often enough "
            "that what deltas build on is kept (a manager with max_to_keep= deletes old steps)"
        )
    return known | {here: None}


def _latest_first(folder: AnyPath) -> Sequence[AnyPath]:
    try:
        if not isinstance(folder, Path):
            return folder.folders()[::-1]
        return sorted((path for path in folder.iterdir() if path.is_dir()), key=modified, reverse=True)
    except OSError:  # which may not be listed
        return []
