"""What operators ask of shared state: `warmprefix state`."""
