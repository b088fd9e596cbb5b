"""Files that an earlier kvjax wrote, and an independent reader of what they freeze."""
