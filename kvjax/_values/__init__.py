"""Plain values: NumPy and JAX arrays with names, no table and no backend."""
