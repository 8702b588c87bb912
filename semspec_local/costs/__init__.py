"""What a token costs on this machine, measured and kept, and whether drafting pays by it."""
