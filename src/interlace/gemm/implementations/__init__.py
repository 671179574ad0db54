"""Implementations that several operators around a matrix product share, each in a file."""
