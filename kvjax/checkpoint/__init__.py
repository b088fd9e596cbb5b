"""Checkpoints of tables: the format on disk, written and read; needs no Orbax."""

from kvjax.checkpoint._catalog import Catalog as Catalog
from kvjax.checkpoint._catalog import seal as seal
from kvjax.checkpoint._restore import Restore as Restore
from kvjax.checkpoint._restore import restore as restore
from kvjax.checkpoint._write import check_saved as check_saved
from kvjax.checkpoint._write import snapshot as snapshot
from kvjax.checkpoint._write import write as write
