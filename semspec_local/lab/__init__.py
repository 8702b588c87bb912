"""Making probes: collect -> cluster -> label -> train -> evaluate."""
