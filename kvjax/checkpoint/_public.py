"""The public names of `kvjax.checkpoint`, and what adapters use of it."""

from kvjax.checkpoint._catalog import Catalog as Catalog
from kvjax.checkpoint._catalog import missing_lists as missing_lists
from kvjax.checkpoint._catalog import write_manifest as write_manifest
from kvjax.checkpoint._chain import Chain as Chain
from kvjax.checkpoint._chain import unreplaced as unreplaced
from kvjax.checkpoint._chain_rows import ChainRows as ChainRows
from kvjax.checkpoint._cursors import finished as finished
from kvjax.checkpoint._diff import Diff as Diff
from kvjax.checkpoint._diff import TableDiff as TableDiff
from kvjax.checkpoint._diff import diff as diff
from kvjax.checkpoint._format import CheckpointError as CheckpointError
from kvjax.checkpoint._locate import PathLike as PathLike
from kvjax.checkpoint._restore import How as How
from kvjax.checkpoint._restore_all import restore as restore
from kvjax.checkpoint._restore_all import restore_all as restore_all
from kvjax.checkpoint._rewrite import compact as compact
from kvjax.checkpoint._rewrite import prune as prune
from kvjax.checkpoint._save import copied as copied
from kvjax.checkpoint._save import save as save
from kvjax.checkpoint._stored import Stored as Stored
from kvjax.checkpoint._verify import FileReport as FileReport
from kvjax.checkpoint._verify import Verified as Verified
from kvjax.checkpoint._verify import verify as verify
from kvjax.checkpoint._write import snapshot as snapshot
from kvjax.checkpoint._write import write as write
