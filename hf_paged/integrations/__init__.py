"""Adapters to other libraries. Nothing else in hf_paged imports them."""
