"""Attention over keys and values in codes: plain queries and operands in, a plain tensor out."""
