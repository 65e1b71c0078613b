"""From overrides to a submitted run: compose, check, plan, freeze, hand over. Imports neither torch nor wandb."""
