"""A module that ends the process when it is imported, as a script does that finds no GPU."""

import sys

sys.exit("no GPU")
