"""What every rank executes: a mixture-of-experts trainer that reads one run directory."""
