"""The life of peers, driven step by step: pure decisions, and real code under a scheduler with a seed."""
