"""The training write: optax transforms, run row by row."""
