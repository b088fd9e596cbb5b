"""`ReleaseInfo`: what is known of a release without a look at its tables, in small files of its folder."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvjax._formats.atomic import saying, written
from kvjax._values.arguments import integer_in, is_integer, is_real
from kvjax.serving._format import FrozenError, contents, damaged, read

SUFFIX = ".frozen"
"""Of the file of a table."""

FILES = "files"
"""The folder of other files."""

_CHECKPOINT = "checkpoint"
INFO = "info"
"""A file of what is known of it."""

_MOST_BYTES = 1 << 24
_LONGEST_NAME = 255  # bytes, which are characters, as names are percent-encoded
_MOST_SECONDS = 1e11  # to the year 5138, which datetime can say


@dataclasses.dataclass(frozen=True)
class ReleaseInfo:
    """What is known of a release without a look at its tables.

    Attributes:
      number: of the release.
      published: when it became the current release, in UTC.
      checkpoint: digests of the checkpoint that its tables come from; () if there is none.
      source: the folder of that checkpoint when it was followed; None if there is none.
      again: the number of the release that it repeats, after a rollback; None for other releases.
      prune: the rule by which `Releases.follow` has left rows out, in words; None if there was none.
      digests: CRC-32 of what belongs to it, by the path in its folder: of the description of each table's file (which
        contains those of its arrays), and of all bytes of each other file. None if they were not recorded (early
        releases).
      damaged: why the other attributes are not known; the release then cannot be opened. None if they are known.

    Example:
      >>> import tempfile, kvjax
      >>> from kvjax.serving import Changes, Releases
      >>> user = kvjax.get_table("doc_release_info", dim=1).upsert([1], [[1.0]])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     releases = Releases(folder)
      ...     first = releases.publish({"user": user}, {"bias": b"0.5"})
      ...     _ = releases.update({"user": Changes([1], [[9.0]])})
      ...     last = releases.rollback(1).info
      >>> last.number, last.again, last.original, last.damaged, sorted(last.digests)
      (3, 1, 1, None, ['files/bias', 'user.frozen'])
      >>> kvjax.drop_table("doc_release_info")
    """

    number: int
    published: datetime.datetime
    checkpoint: tuple[str, ...]
    source: str | None
    again: int | None
    prune: str | None = None
    digests: Mapping[str, int] | None = None
    damaged: str | None = None

    @property
    def original(self) -> int:
        """The number of the release that first had these tables and files."""
        return self.number if self.again is None else self.again


def info_of(path: Path) -> ReleaseInfo:
    """What the folder of a release says.

    Raises:
      FileNotFoundError: it is not there.
    """
    info = ReleaseInfo(int(path.name), _utc(os.lstat(path).st_mtime), (), None, None)
    try:
        with saying("open", reads=True):
            os.scandir(path).close()  # or it is no folder
            return _read(path, info)
    except FileNotFoundError:  # it went meanwhile
        raise
    except OSError as error:
        return dataclasses.replace(info, damaged=f"{error.strerror}: {error.filename}")
    except FrozenError as error:
        return dataclasses.replace(info, damaged=str(error))


def identity_at(path: Path) -> bytes | None:
    """Changes when another release takes the place of the one in this folder; None if nothing is known of that. By what
    is written there, the time of publication included, as some file systems give a file another number each time."""
    with contextlib.suppress(OSError, FrozenError):
        return contents(path / INFO, _MOST_BYTES)
    return None


def _read(path: Path, info: ReleaseInfo) -> ReleaseInfo:
    at, said = path / _CHECKPOINT, path / INFO
    if at.exists():
        digests = contents(at, _MOST_BYTES)
        if not digests.isascii():
            error = damaged(at, "open", "digests of a checkpoint", f"{digests!r:.100}")
            return dataclasses.replace(info, damaged=str(error))
        info = dataclasses.replace(info, checkpoint=tuple(digests.decode().split()))
    if not said.exists():
        return info
    data = contents(said, _MOST_BYTES)
    try:
        found = json.loads(data)
        seconds, source, again = found["published"], found["source"], found["again"]
        prune, digests = found.get("prune"), found.get("digests")  # early ones have none
        good = is_real(seconds) and abs(seconds) < _MOST_SECONDS and isinstance(source, str | None)
        good = good and (again is None or is_integer(again)) and isinstance(prune, str | None)
        if not good or not (digests is None or _are_digests(digests)):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        error = damaged(said, "open", "what is known of a release, in JSON", f"{data!r:.100}")
        return dataclasses.replace(info, damaged=str(error))
    return ReleaseInfo(info.number, _utc(seconds), info.checkpoint, source, again, prune, digests)


def _utc(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def _are_digests(x: object) -> bool:
    is_crc = integer_in(0, 2**32 - 1)
    return isinstance(x, dict) and all(_is_place(place) and is_crc(crc) for place, crc in x.items())


def _is_place(place: str) -> bool:
    """Whether it is the path of a table, or of another file, and of nothing outside the folder."""
    folder, _, name = place.rpartition("/")
    if name in ("", ".", "..") or len(name) > _LONGEST_NAME:
        return False
    return name.isascii() and (folder == FILES or (folder == "" and name.endswith(SUFFIX)))


def write_info(
    folder: Path, checkpoint: Sequence[str] = (), source: str | None = None, again: int | None = None,
    prune: str | None = None,
) -> None:  # fmt: skip
    """Writes what a `ReleaseInfo` says: that it is published now, and with the tables and files that are there."""
    if checkpoint:
        with written(folder / _CHECKPOINT) as file:
            file.write(" ".join(checkpoint).encode())
    digests = {table.name: read(table).digest for table in sorted(folder.glob(f"*{SUFFIX}"))}
    digests |= {f"{FILES}/{file.name}": zlib.crc32(file.read_bytes()) for file in sorted((folder / FILES).iterdir())}
    said = {"published": time.time(), "source": source, "again": again, "prune": prune, "digests": digests}
    with written(folder / INFO) as file:
        file.write(json.dumps(said).encode())
