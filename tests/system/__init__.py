"""Whole engines over real transports, in processes of their own: what shows only when all parts are together.

`TENT_TEST_FULL=1` in the environment repeats what depends on chance as often as a release is worth: hundreds
of rounds instead of a few, and seconds instead of milliseconds.
"""
