"""The transport `mpcomm`: one transfer of a self-scheduling vendor library per merged request."""
