"""Formats: files of columns that other tools read and write; one file each, which knows no table."""
