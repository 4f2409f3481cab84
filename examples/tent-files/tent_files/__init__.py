"""The transport `files` for TENT: between host memory and files of this machine."""
