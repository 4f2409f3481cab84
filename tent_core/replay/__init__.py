"""Replays request traces: a prefill and a decode process move KV-cache blocks through the engine, every byte checked."""
