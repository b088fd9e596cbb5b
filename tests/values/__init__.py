"""Initial rows, rounding and constraints."""
