"""The operators, a folder each. They do not import one another."""
