"""`Releases`: a folder of releases of a model's tables and files, of which one is the current one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax._formats.choices import Quantised
from kvjax._formats.paths import PathLike, kept
from kvjax._formats.quantise import check_quantised
from kvjax._values.arguments import is_integer
from kvjax._values.errors import fail, warn
from kvjax._values.lookups import Missing
from kvjax.serving._contents import RowsLike
from kvjax.serving._folder import Folder, file_of, write_files
from kvjax.serving._format import FrozenError, share
from kvjax.serving._frozen import FrozenTable
from kvjax.serving._info import FILES, ReleaseInfo, identity_at, info_of, write_info
from kvjax.serving._release import Changes, PausedError, Release, check_by_name, check_changes

if TYPE_CHECKING:
    from kvjax._values.prune import PruneLike
    from kvjax.checkpoint._chains.chain import Chain
    from kvjax.serving._follow import ReleaseOptions


class _OvertakenError(Exception):
    """Another release of a checkpoint has become the current one, of a newer one perhaps."""


class Releases:
    """A folder in which a trainer publishes releases of a model, and from which servers read the current one.

    A release holds tables and any other files: dense parameters, a program of `kvjax.export`. It is complete before it
    becomes the current one, and a server keeps its release until it asks for another. So no reader sees parts of two
    releases. Any number of threads and processes may read, and any may publish, one after the other. A writer that is
    killed does not change the current release.

    Args:
      path: the folder, on one file system, of releases alone, as old ones are removed; the first release makes it.

    Raises:
      TypeError, ValueError: `path` is not the path of a folder on this machine.

    Example:
      >>> import tempfile, kvjax, numpy as np
      >>> from kvjax.serving import Changes, Releases
      >>> user = kvjax.get_table("doc_releases", dim=1).upsert([1, 2], [[1.0], [2.0]])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     first = Releases(folder).publish({"user": user}, {"bias": b"0.5"})
      ...     server = Releases(folder)
      ...     before = server.current()
      ...     _ = Releases(folder).update({"user": Changes([2], [[9.0]], removed=[1])})
      ...     after = server.refresh()
      >>> [v["user"].lookup([1, 2])[:, 0].tolist() for v in (before, after)], after.files
      ([[1.0, 2.0], [0.0, 9.0]], {'bias': b'0.5'})
      >>> kvjax.drop_table("doc_releases")
    """

    def __init__(self, path: PathLike) -> None:
        self.path = kept(path, "Releases")
        self._folder = Folder(self.path)
        self._current: Release | None = None
        self._identity: bytes | None = None  # of the current one

    # ---- reading ---------------------------------------------------------------------------------------------

    def current(self) -> Release:
        """The release that the last `refresh` returned; at the first call, the current release.

        Returns:
          An open `Release`; the same one until the next `refresh`.

        Raises:
          FrozenError: none has been published, or it is damaged.

        Example:
          >>> import tempfile, kvjax
          >>> from kvjax.serving import Changes, Releases
          >>> user = kvjax.get_table("doc_current", dim=1).upsert([1], [[1.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     releases = Releases(folder)
          ...     first = releases.publish({"user": user}, {"bias": b"0.5"})
          ...     server = Releases(folder)
          ...     numbers = [server.current().number]
          ...     _ = releases.update({"user": Changes([1], [[9.0]])})
          ...     numbers += [server.current().number, server.refresh().number, server.current().number]
          >>> numbers
          [1, 1, 2, 2]
          >>> kvjax.drop_table("doc_current")
        """
        current = self._current
        return self.refresh() if current is None else current

    def refresh(self) -> Release:
        """The release that is current now. The call reads two small files.

        Returns:
          An open `Release`; the one of before if it is still the current one.

        Raises:
          FrozenError: none has been published, or it is damaged; then `current` still returns the previous one.

        Example:
          >>> import tempfile, kvjax
          >>> from kvjax.serving import Changes, Releases
          >>> user = kvjax.get_table("doc_releases_refresh", dim=1).upsert([1], [[1.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     releases = Releases(folder)
          ...     first = releases.publish({"user": user}, {"bias": b"0.5"})
          ...     server = Releases(folder)
          ...     same = server.refresh() is server.refresh()
          ...     _ = releases.update({"user": Changes([1], [[9.0]])})
          ...     now = server.refresh()
          >>> same, now.number, now["user"].lookup(1).tolist()
          (True, 2, [9.0])
          >>> kvjax.drop_table("doc_releases_refresh")
        """
        with self._folder.opening:
            while True:
                name = self._folder.name()
                now, identity = self._current, identity_at(self.path / name)
                # In a folder that was made anew, another release may have the number.
                if now is not None and now.path.name == name and identity in (self._identity, None):
                    return now
                try:
                    self._current, self._identity = Release(self.path / name), identity
                    return self._current
                except FileNotFoundError as error:
                    if self._folder.name() == name:  # else it went while this one came
                        raise self._folder.damaged("refresh", "the files of the current release", str(error)) from error

    def history(self) -> list[ReleaseInfo]:
        """What is known of the available releases, in order of publication. The last one is the current one. If what
        is known of one is damaged, its info says so; whether its tables and files are there, `open` says.

        Returns:
          A list of `ReleaseInfo`, oldest first.

        Raises:
          FrozenError: none has been published.

        Example:
          >>> import tempfile, kvjax
          >>> from kvjax.serving import Changes, Releases
          >>> user = kvjax.get_table("doc_history", dim=1).upsert([1], [[1.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     releases = Releases(folder)
          ...     first = releases.publish({"user": user}, {"bias": b"0.5"})
          ...     _ = releases.update({"user": Changes([1], [[9.0]])})
          ...     infos = releases.history()
          >>> [(info.number, info.damaged) for info in infos]
          [(1, None), (2, None)]
          >>> kvjax.drop_table("doc_history")
        """
        while True:
            found: list[ReleaseInfo] = []
            last = self._folder.name("history")
            for number in self._folder.published("history"):
                with contextlib.suppress(FileNotFoundError):  # it went meanwhile
                    found.append(info_of(self._folder.place(number)))
            if found or self._folder.name("history") == last:  # else all went, as others were published
                return found

    def open(self, number: int) -> Release:
        """Opens any available release, not only the current one.

        Args:
          number: of the release.

        Returns:
          The open `Release`; `current` stays what it is.

        Raises:
          KeyError: it is not there.
          FrozenError: none has been published, or it is damaged.
          TypeError: `number` is not an integer.

        Example:
          >>> import tempfile, kvjax
          >>> from kvjax.serving import Changes, Releases
          >>> user = kvjax.get_table("doc_releases_open", dim=1).upsert([1], [[1.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     releases = Releases(folder)
          ...     first = releases.publish({"user": user}, {"bias": b"0.5"})
          ...     _ = releases.update({"user": Changes([1], [[9.0]])})
          ...     before = Releases(folder).open(1)
          >>> before.number, before["user"].lookup(1).tolist()
          (1, [1.0])
          >>> kvjax.drop_table("doc_releases_open")
        """
        return self._open(number, "open")

    @property
    def paused(self) -> bool:
        """Whether the current release stays until `resume`, after a `rollback`."""
        return self._folder.paused()

    def _open(self, number: int, op: str) -> Release:
        failed = self._folder.failed
        if not is_integer(number):
            want, got = "the number of a release", f"{number!r:.50}"
            raise failed(TypeError, op, want, got, "Releases.history() has those of all that are there")
        there = self._folder.published(op)
        path = self._folder.place(number)
        try:
            if number in there:
                return Release(path)
        except FileNotFoundError as error:
            if path.exists():  # else it went meanwhile
                raise failed(FrozenError, op, f"the files of release {number}", str(error), "open another") from error
            there.remove(number)
        mend = "choose one of these (a greater keep= of the writer keeps more)"
        raise failed(KeyError, op, f"one of the releases {there}", f"{number}", mend)

    # ---- writing ---------------------------------------------------------------------------------------------

    def publish(
        self,
        tables: Mapping[str, RowsLike],
        files: Mapping[str, bytes] | None = None,
        *,
        keep: int = 2,
        quantise: Quantised | None = None,
        prune: PruneLike | None = None,
        missing: Missing | None = None,
    ) -> Release:
        """Makes a release of whole tables the current one.

        Args:
          tables: the source of each table, by name, as for `FrozenTable.write`.
          files: other files of the release, by name.
          keep: how many releases stay on the disk. A server that has an older one open can still read it.
          quantise: for the rows of all tables, as in `FrozenTable.write`.
          prune: as there.
          missing: as there.

        Returns:
          The new release, which `current` then returns too.

        Raises:
          ValueError, OSError: as `FrozenTable.write`, or there is no table and no file, or a name or `keep` is not
            possible; the current release stays.
          TypeError: `tables` or `files` is not a mapping from names, a file is not bytes, or `keep` is not an integer.
          PausedError: the releases are paused, by `rollback`.

        Example:
          >>> import tempfile, kvjax
          >>> from kvjax.serving import Releases
          >>> user = kvjax.get_table("doc_publish", dim=1).upsert([1], [[1.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     release = Releases(folder).publish({"user": user}, {"bias": b"0.5"})
          >>> release, release["user"].lookup(1).tolist()
          (Release(1, tables=['user'], files=['bias']), [1.0])
          >>> kvjax.drop_table("doc_publish")
        """
        check_by_name("publish", tables, files)
        if not tables and not files:
            raise self._folder.failed(
                ValueError, "publish", "a table or a file", "none", "give what servers are to read"
            )
        with self._writing("publish", keep):
            with self._folder.new(self._least()) as folder:
                for name, source in tables.items():
                    path = file_of(folder, name)
                    FrozenTable.write(path, source, quantise=quantise, prune=prune, missing=missing)
                write_files(folder, files or {})
                write_info(folder)
            return self.refresh()  # before another writer has the folder

    def update(
        self, changes: Mapping[str, Changes], files: Mapping[str, bytes] | None = None, *, keep: int = 2
    ) -> Release:
        """Publishes a release with some changes to the current one.

        Args:
          changes: changes to tables, by name; other tables stay as they are, and share their files on the disk.
          files: those that change, by name.
          keep: see `publish`.

        Returns:
          The new release, which `current` then returns too.

        Raises:
          KeyError: a table is not in the current release.
          FrozenError: none has been published, or it is damaged.
          ValueError, OSError: as `FrozenTable.update`; the current release stays.
          PausedError: the releases are paused, by `rollback`.
          TypeError: `changes` or `files` is not a mapping from names, a value is not `Changes` or bytes, or `keep` is
            not an integer.

        Example:
          >>> import tempfile, kvjax
          >>> from kvjax.serving import Changes, Releases
          >>> user = kvjax.get_table("doc_releases_update", dim=1).upsert([1], [[1.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     releases = Releases(folder)
          ...     first = releases.publish({"user": user}, {"bias": b"0.5"})
          ...     second = releases.update({"user": Changes([2], [[9.0]])}, {"bias": b"0.9"})
          >>> second["user"].lookup([1, 2])[:, 0].tolist(), second.files
          ([1.0, 9.0], {'bias': b'0.9'})
          >>> kvjax.drop_table("doc_releases_update")
        """
        check_by_name("update", changes, files)
        check_changes(changes)
        self._folder.name("update")  # before there is a folder
        with self._writing("update", keep):
            with self._folder.new(self._least()) as folder:
                before = self.refresh()
                old = dict(before)
                for name in changes.keys() - old.keys():
                    raise fail(
                        KeyError, name, "update", "a table of the current release", f"{sorted(old)}",
                        "publish it first, with Releases.publish",
                    )  # fmt: skip
                for name, table in old.items():
                    path = folder / table.path.name
                    if name not in changes:
                        share(table.path, path)
                        continue
                    change = changes[name]
                    table.update(**vars(change), path=path)
                write_files(folder, before.files | dict(files or {}))
                unchanged = None if changes else before.info
                if unchanged is None:
                    write_info(folder)
                else:
                    write_info(folder, unchanged.checkpoint, unchanged.source, prune=unchanged.prune)
            return self.refresh()  # before another writer has the folder

    def follow(
        self,
        checkpoint: PathLike,
        files: Mapping[str, bytes] | Callable[[Path], Mapping[str, bytes]] | None = None,
        *,
        tables: Collection[str] | None = None,
        keep: int = 2,
        quantise: Quantised | None = None,
        prune: PruneLike | None = None,
        missing: Missing | None = None,
        base: PathLike | Sequence[PathLike] | None = None,
    ) -> Release:
        """Makes the tables of a checkpoint the current release; does nothing if they are that already. While the
        releases are paused, by `rollback`, it only warns.

        If the checkpoint is a delta that builds, through any number of others, on the checkpoint of the current
        release, only what has changed since is read, and the rest is copied; unchanged tables share their files.
        Otherwise whole tables are written. So call this repeatedly with the folder in which a trainer saves its deltas
        (``kvjax.checkpoint.save(folder / str(step), tables, since="serving")``, or an Orbax manager). This loads no
        JAX, but kvjax's C++ core; servers need neither.

        Args:
          checkpoint: path of the checkpoint, as for `kvjax.checkpoint.restore`.
          files: those that change, by name; or a function that returns them, called when a checkpoint is found that is
            not the current release's, and again if another process follows meanwhile. It gets the folder of that
            checkpoint's tables: in a step of Orbax, the other items (dense parameters) are beside that folder.
          tables: names of the tables to take; by default all.
          keep: see `publish`.
          quantise: for the rows of all tables, as in `FrozenTable.write`; by default as in the current release.
          prune: which rows to leave out, by default none. A changed row that fails the rule is left out as if it had
            been removed, so the rule must depend on one row alone: not ``max_age`` or ``top_k``, and a predicate may
            not depend on other rows, or on ``last_step``. A predicate is identified by its name, so it must be a
            module-level function (no lambda, closure, nested function or bound method): give a different rule a
            different name. After a change of `prune`, whole tables are written.
          missing: as there; by default as in the current release, except for a row that unadmitted keys share.
          base: where to look for the checkpoints that a delta builds on, as in `kvjax.checkpoint.restore`.

        Returns:
          The new release; the current one if it has these tables already, or the releases are paused.

        Raises:
          CheckpointError: there is no checkpoint, it is damaged, or has no table of a name in `tables`; the current
            release stays.
          ValueError, OSError: as `FrozenTable.write`, or deltas cannot be followed with this `prune`; the current
            release stays.

        Example:
          >>> import tempfile, kvjax
          >>> from kvjax.serving import Releases
          >>> user = kvjax.get_table("doc_follow", dim=1).upsert([1, 2], [[1.0], [2.0]])
          >>> folder = tempfile.TemporaryDirectory()
          >>> saved, server = folder.name + "/saved", Releases(folder.name + "/model")
          >>> kvjax.checkpoint.save(saved + "/0", [user], cursor="serving")
          >>> before = server.follow(saved)
          >>> user = user.upsert([2], [[9.0]]).remove([1])
          >>> kvjax.checkpoint.save(saved + "/1", [user], since="serving")
          >>> after = server.follow(saved)
          >>> [release["doc_follow"].lookup([1, 2])[:, 0].tolist() for release in (before, after)]
          [[1.0, 2.0], [0.0, 9.0]]
          >>> kvjax.drop_table("doc_follow")
          >>> folder.cleanup()
        """
        from kvjax.checkpoint._chains.chain import chosen_tables, unreplaced
        from kvjax.serving._follow import ReleaseOptions

        if quantise is not None:
            check_quantised(quantise, str(self.path))
        chosen, options = chosen_tables(tables, "follow"), ReleaseOptions(quantise, prune, missing)
        try:
            self._folder.check_not_paused("follow")
            while True:
                before = self._before()  # first: who finds a newer checkpoint meanwhile publishes behind this
                follow = functools.partial(
                    self._follow, before=before, files=files, chosen=chosen, keep=keep, options=options
                )
                with contextlib.suppress(_OvertakenError):
                    return unreplaced(checkpoint, base, "follow", follow)
        except PausedError as error:  # no error of a trainer's: a later call takes what this one leaves
            warn(str(error))
            return self.refresh()

    def _follow(
        self, chain: Chain, before: Release | None, files: Any, chosen: frozenset[str] | None, keep: int,
        options: ReleaseOptions,
    ) -> Release:  # fmt: skip
        from kvjax.serving._follow import write_release

        names = chain.names if chosen is None else sorted(chosen)
        for name in chosen or ():
            chain.catalog.open(name)  # or it says what there is
        digests, made_of = chain.catalog.digests, files

        def is_current(before: Release) -> bool:
            same = set(before.checkpoint) & set(digests) and set(before) == set(names)
            return bool(same) and (callable(made_of) or not made_of) and options.is_of(before)

        if before is not None and is_current(before):
            return before
        if callable(files):
            files = files(chain.catalog.directory)
        check_by_name("follow", {}, files)
        with self._writing("follow", keep):
            with self._folder.new(self._least()) as folder:
                now = self._before()
                if now is not None and now is not before and now.checkpoint:  # of who has followed, too
                    raise _OvertakenError
                before = now  # of who updates perhaps, again and again: which must not keep this one from publishing
                write_release(folder, chain, names, before, files or {}, options)
            return self.refresh()  # before another writer has the folder

    def rollback(self, number: int) -> Release:
        """Makes the tables and files of an older release current again, and lets no other release take its place.

        They become a new release, which shares their files on the disk, so readers take it as they take any other, and
        numbers only grow. The releases are paused from then on: `follow` does nothing but warn, and `publish` and
        `update` raise an error, until `resume`. A process that is killed meanwhile has done either all of this or
        nothing. If the current release has these tables and files already, it stays, and is paused.

        Args:
          number: of the release. `history` has those that are there.

        Returns:
          The new release. Its ``info.again`` is the number of the old one.

        Raises:
          KeyError: the release is not there.
          FrozenError: none has been published, or it is damaged.
          OSError: the new release cannot be written. The current release stays.

        Example:
          >>> import tempfile, kvjax
          >>> from kvjax.serving import Changes, Releases
          >>> user = kvjax.get_table("doc_rollback", dim=1).upsert([1], [[1.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     trainer, server = Releases(folder), Releases(folder)
          ...     _ = trainer.publish({"user": user}, {"bias": b"0.5"})
          ...     _ = trainer.update({"user": Changes([1], [[9.0]])}, {"bias": b"0.9"})
          ...     _ = Releases(folder).rollback(1)
          ...     now = server.refresh()
          ...     before = [(info.number, info.again) for info in server.history()], server.paused
          ...     trainer.resume()
          >>> now["user"].lookup(1).tolist(), now.files, before
          ([1.0], {'bias': b'0.5'}, ([(1, None), (2, None), (3, 1)], True))
          >>> kvjax.drop_table("doc_rollback")
        """
        self._folder.name("rollback")  # or it says so, and makes no folder
        with self._folder.locked("rollback"):
            old = self._open(number, "rollback")
            now = None
            with contextlib.suppress(FrozenError, OSError):  # of the current one, which may be damaged
                now = self.refresh()
            if now is not None and now.info.original == old.info.original:
                self._folder.pause(now.path.name)
                return now
            with self._folder.new(self._least(), paused=True) as folder:
                for table in old.values():
                    share(table.path, folder / table.path.name)
                for name in old.files:
                    share(file_of(old.path / FILES, name, ""), file_of(folder / FILES, name, ""))
                write_info(folder, old.checkpoint, old.info.source, old.info.original, old.info.prune)
            return self.refresh()  # before another writer has the folder

    def resume(self) -> None:
        """Ends the pause after a `rollback`: other releases may become current again. Does nothing without a pause.

        Raises:
          FrozenError: none has been published.

        Example:
          >>> import tempfile, kvjax
          >>> from kvjax.serving import Releases
          >>> user = kvjax.get_table("doc_resume", dim=1).upsert([1], [[1.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     releases = Releases(folder)
          ...     first = releases.publish({"user": user}, {"bias": b"0.5"})
          ...     _ = releases.rollback(1)
          ...     before = releases.paused
          ...     releases.resume()
          ...     after = releases.paused
          >>> before, after
          (True, False)
          >>> kvjax.drop_table("doc_resume")
        """
        self._folder.name("resume")
        with self._folder.locked("resume"):
            self._folder.resume()

    def _before(self) -> Release | None:
        return self.refresh() if (self.path / "current").exists() else None

    @contextlib.contextmanager
    def _writing(self, op: str, keep: int) -> Generator[None]:
        """Has the folder of releases for a new one, which the body makes.

        Raises:
          PausedError: another release stays the current one.
        """
        if not is_integer(keep) or keep < 1:  # before anything is published
            kind, want = ValueError if is_integer(keep) else TypeError, "keep= of 1 or more releases"
            raise self._folder.failed(kind, op, want, f"{keep!r:.50}", "say how many stay on the disk")
        with self._folder.locked(op):
            self._folder.check_not_paused(op)
            yield
            self._folder.trim(keep)

    def _least(self) -> int:
        """The least number of the next release: behind the one that is open here, also if that is lost."""
        return 1 if self._current is None else self._current.number + 1

    def __reduce__(self) -> Any:
        return Releases, (self.path,)  # a process that gets it opens the current release itself

    def __repr__(self) -> str:
        return f"Releases({str(self.path)!r})"
