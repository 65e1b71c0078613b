"""The models, written plainly; parallelism, recomputation and compilation are applied from outside."""
