"""Read the settings of the reference engine from a DeepSpeed JSON configuration."""
