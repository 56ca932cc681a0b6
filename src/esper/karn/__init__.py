"""Shows runs: progress, tables and figures. Karn holds the windows on a run."""
