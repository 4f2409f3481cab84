"""Looks at a machine for what TENT needs there, and says what to do about the rest. Changes nothing."""
