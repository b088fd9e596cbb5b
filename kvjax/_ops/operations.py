"""Operations: what each operation of a table needs, as the C++ side says it."""

from typing import NamedTuple

from kvjax.ffi import host


class Operation(NamedTuple):
    """What an operation does and needs.

    Attributes:
      writes: it makes the next version.
      makes_rows: it may give a row to a key that has none.
      needs_initial: such a row begins as the initial row of its key, which the call brings where only JAX can make it.
      evicts: it removes the rows that a policy chooses among all that the table has.
    """

    writes: bool
    makes_rows: bool
    needs_initial: bool
    evicts: bool


OPERATIONS = {name: Operation(**needs) for name, needs in host.OPERATIONS.items()}
"""By the name that errors have."""
