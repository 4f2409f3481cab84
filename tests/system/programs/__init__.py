"""What other processes run in these tests: handed to them as source, by `support.program`."""
