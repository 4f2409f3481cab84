"""The transport `newname` for TENT: requests as frames over a TCP stream."""
