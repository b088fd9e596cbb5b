"""Tables of other systems, read as rows that a table takes."""

from kvjax._formats.errors import FileError as FileError
from kvjax.convert._deeprec import from_deeprec as from_deeprec
from kvjax.convert._dynamicemb import from_dynamicemb as from_dynamicemb
from kvjax.convert._export_checkpoint import ExportReport as ExportReport
from kvjax.convert._export_checkpoint import export_checkpoint as export_checkpoint
from kvjax.convert._files import from_dense as from_dense
from kvjax.convert._files import from_npz as from_npz
from kvjax.convert._files import from_parquet as from_parquet
from kvjax.convert._files import from_safetensors as from_safetensors
from kvjax.convert._import_checkpoint import ImportReport as ImportReport
from kvjax.convert._import_checkpoint import import_checkpoint as import_checkpoint
from kvjax.convert._imported import Imported as Imported
from kvjax.convert._sok import from_sok as from_sok
from kvjax.convert._tfplus import from_tfplus as from_tfplus
from kvjax.convert._tfra import from_tfra as from_tfra

__all__ = [
    "ExportReport", "FileError", "ImportReport", "Imported", "export_checkpoint", "from_deeprec", "from_dense",
    "from_dynamicemb", "from_npz", "from_parquet", "from_safetensors", "from_sok", "from_tfplus", "from_tfra",
    "import_checkpoint",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
