"""The command line, ``kvjax`` or ``python -m kvjax``. What only looks at a checkpoint loads no JAX."""
