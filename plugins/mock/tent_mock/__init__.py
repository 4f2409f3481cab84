"""A transport for TENT that does what a script tells it."""
