"""Whole engines over real transports, each in a process of its own: what only shows when all parts are together.

`TENT_TEST_FULL=1` in the environment repeats what depends on chance as often as a release is worth: hundreds
of rounds instead of a few, and seconds instead of milliseconds.
"""
