"""The runtime against a model of it."""
