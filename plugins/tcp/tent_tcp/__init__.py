"""The transport `tcp` of TENT: any two processes that a TCP connection can join."""
