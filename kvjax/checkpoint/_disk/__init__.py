"""The format on disk: arrays, files and what kvjax.json says, of a table that need not be in this process."""
