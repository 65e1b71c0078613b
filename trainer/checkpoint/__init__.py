"""Weights and states on disk."""
