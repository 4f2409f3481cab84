"""Prints the directory that makes the stand-in importable: PYTHONPATH=$(python -m tent_mock.mpcomm)."""

from tent_mock.mpcomm import ON_THE_PATH

print(ON_THE_PATH)
