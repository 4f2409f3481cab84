"""The transport `shm` of TENT: one copy between two processes of one host."""
