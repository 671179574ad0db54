"""All-to-All + batch of GEMMs; see README.md."""
