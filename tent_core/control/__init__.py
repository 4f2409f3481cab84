"""The control plane: how engines find each other, follow each other's segments, and learn who is gone."""
