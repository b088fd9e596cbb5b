"""What a table is: its options, and where it may be."""
