"""Frozen tables, and what serves them."""
