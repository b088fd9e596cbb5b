"""The command line, ``kvjax`` or ``python -m kvjax``. No command loads JAX."""
