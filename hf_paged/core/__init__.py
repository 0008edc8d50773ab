"""Blocks, tables and steps: what knows of no cache, prefix, backend or file."""
