"""Errors: the one form that those of Python and of the C++ side have."""


def fail(kind: type[Exception], table: str, op: str, want: str, got: str, mend: str) -> Exception:
    """An error that names the table, the operation, what was wanted and got, and the mend."""
    return kind(f"kvjax: table {table!r}, {op}: want {want}, got {got}; {mend}")
