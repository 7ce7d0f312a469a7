"""Compute ZeRO-3's linear layer as an autograd Function, and replace APIs that a release of torch may lack."""
