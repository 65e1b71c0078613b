"""Many runs: sweeps, and what became of them. Imports no torch and no wandb."""
