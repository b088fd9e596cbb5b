"""Checkpoints of tables: the format on disk, written and read; needs no Orbax."""

from kvjax.checkpoint._format import names as names
from kvjax.checkpoint._format import read_meta as read_meta
from kvjax.checkpoint._restore import Restore as Restore
from kvjax.checkpoint._write import check_saved as check_saved
from kvjax.checkpoint._write import snapshot as snapshot
from kvjax.checkpoint._write import write as write
