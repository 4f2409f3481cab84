"""The transport `uds` for TENT: requests as frames over a Unix-domain socket."""
