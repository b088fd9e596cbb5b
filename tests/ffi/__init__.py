"""The compiled modules."""
