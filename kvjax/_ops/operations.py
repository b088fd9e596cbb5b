"""Operations: what each write of a table may do to its rows."""

from typing import NamedTuple


class Operation(NamedTuple):
    """What a write may do.

    Attributes:
      makes_rows: keys without a row may get one, for which there must be space.
      takes_initial: those rows begin as initial rows, which the call brings where only JAX can make them.
      chooses_rows: a policy chooses rows among all that the table has.
    """

    makes_rows: bool = False
    takes_initial: bool = False
    chooses_rows: bool = False


OPERATIONS = {
    "lookup_or_insert": Operation(makes_rows=True, takes_initial=True),
    "pin": Operation(makes_rows=True, takes_initial=True),
    "unpin": Operation(),
    "remove": Operation(),
    "upsert": Operation(makes_rows=True),
    "assign": Operation(),
    "add": Operation(makes_rows=True, takes_initial=True),
    "accum": Operation(makes_rows=True),
    "evict": Operation(chooses_rows=True),
    "restrict": Operation(chooses_rows=True),
    "clear": Operation(),
    "clear_slots": Operation(),
}
