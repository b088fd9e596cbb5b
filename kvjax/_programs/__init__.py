"""Row programs: the update of one row as a list of instructions, which a table runs on its rows in place."""
