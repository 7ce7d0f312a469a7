"""Export a cell as a stand-alone script, and shrink a failing cell to the smallest cell that fails in the same way."""
