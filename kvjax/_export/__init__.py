"""Exported programs: a function of tables and arrays, for processes that have the tables and not its code."""
