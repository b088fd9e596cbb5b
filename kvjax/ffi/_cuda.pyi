from kvjax.ffi._cpu import *  # noqa: F403

def architectures() -> list[int]:
    """The compute capabilities there is code for: 90 is 9.0."""

def devices() -> int:
    """How many GPUs can be used."""

def trouble() -> str:
    """Why there are none, or nothing."""
