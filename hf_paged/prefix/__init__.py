"""Prompts that are known: the tree of their tokens, and what their K/V depend on besides."""
