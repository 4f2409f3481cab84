"""Replays traces: a prefill and a decode process move KV-cache blocks, every byte checked."""
