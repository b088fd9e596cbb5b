"""The `Table` and the tables of this process."""
