"""Rows of tokens sorted by expert and put back: maps, copies and sums."""
