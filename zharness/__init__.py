"""zharness answers one question: does a sharded training engine compute what plain PyTorch computes?"""

__version__ = "0.1.0"
