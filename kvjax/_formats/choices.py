"""Choices: the names of what a user can ask of files. It loads nothing, so the command line has them at once."""

from typing import Literal, TypeAlias, get_args

FILE_FORMATS = ("safetensors", "npz", "parquet")
"""Files of columns, each with a module here of its name."""

SYSTEMS = ("tfra", "deeprec", "tfplus", "sok", "dynamicemb")
"""Other systems whose tables can be imported."""

IMPORTED = (*FILE_FORMATS, *SYSTEMS)
"""What can become a checkpoint."""

EXPORTED = (*FILE_FORMATS, "deeprec")
"""What a checkpoint can become."""

Quantised: TypeAlias = Literal["float16", "bfloat16", "int8"]
"""How rows are stored: rounded to a dtype, or as int8 times a scale of each row."""

QUANTISED: tuple[Quantised, ...] = get_args(Quantised)

MergeRule: TypeAlias = Literal["newest", "mean", "frequency"]
"""What becomes of a key of which several checkpoints have a row."""

MERGE_RULES: tuple[MergeRule, ...] = get_args(MergeRule)
