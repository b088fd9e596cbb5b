"""Transforms beside dense parameters."""
