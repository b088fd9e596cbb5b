"""What a table is: its options, checked and resolved, and where its rows live."""
