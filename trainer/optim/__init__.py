"""Optimizers over contiguous fp32 slabs, and the learning-rate schedule."""
