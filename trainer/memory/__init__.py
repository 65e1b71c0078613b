"""What is kept and what is computed again: activation checkpointing."""
