"""Slot layouts: names and types of optimizer slots as text, which is how the C++ side and checkpoints have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes as ml_dtypes  # by which NumPy knows their names
import numpy as np

from kvjax._formats.source import row_bytes


def type_text(dtype: Any, shape: Sequence[int]) -> str:
    """(float32, (64,)) -> "float32[64]"; also of JAX's own dtypes, which NumPy does not know."""
    name = dtype.name if hasattr(dtype, "name") else np.dtype(dtype).name
    return f"{name}[{','.join(map(str, shape))}]"


def parse_type(text: str) -> tuple[np.dtype, tuple[int, ...]]:
    """ "float32[64]" -> (dtype float32, (64,)).

    Raises:
      ValueError: the text is no such type.
    """
    dtype, _, shape = text.rstrip("]").partition("[")
    try:
        return np.dtype(dtype), tuple(int(n) for n in shape.split(",") if n)
    except (TypeError, ValueError) as error:
        raise ValueError(f'want the type of a slot, as "float32[64]", got {text!r}') from error


def layout_text(types: Mapping[str, Any]) -> str:
    """The layout "mu|float32[64]|256;count|int32[]|4" of slots by name, with the bytes of each in a row.

    ``ParseLayout`` of the C++ side reads it.

    Args:
      types: anything with a dtype and the shape of one row's slot.
    """
    return ";".join(
        f"{name}|{type_text(t.dtype, t.shape)}|{row_bytes((t.dtype, t.shape))}" for name, t in types.items()
    )


def in_record_order(types: Mapping[str, Any]) -> dict[str, Any]:
    """The slots in the order in which they lie in the record of a row, where ``SlotLayout`` of the C++ side has put
    them: those of a multiple of 16 bytes first."""
    return dict(sorted(types.items(), key=lambda item: row_bytes((item[1].dtype, item[1].shape)) % 16 != 0))


def clean_name(name: str) -> str:
    """A slot name without the characters that a layout is cut at."""
    return name.replace("|", "_").replace(";", "_")
