"""What a run leaves behind: metrics.jsonl, status.json, environment.json, result.json, and a copy in W&B."""
