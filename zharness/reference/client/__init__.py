"""What the caller of ``initialize`` brings: optimizer and schedule, data set, and models built on the meta device."""
