"""The settings that the reference engine reads from a DeepSpeed JSON configuration."""
